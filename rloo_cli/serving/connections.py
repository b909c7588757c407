"""Limits on connections that have not said yet what they want, where uvicorn has none.

uvicorn waits for ever for the head of a request, its parser takes a head of any length, and an open connection costs it a file
descriptor until the client leaves. So a connection gets HEAD_SECONDS for each head and MOST_HEADERS bytes; when there are too many
connections, the one that has been silent for longest makes room.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

MOST_HEADERS = 64 << 10
"""Bytes of a request's head."""
HEAD_SECONDS = 10.0
MOST_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 256
"""What vLLM itself needs: sockets to its engine, files, pipes."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def guard_connections(app: Any) -> None:
    """Put the limits on every connection of the uvicorn server that vLLM keeps in `app.state.server`; nothing without one."""
    server = getattr(getattr(app, "state", None), "server", None)
    if server is not None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(16, min(MOST_CONNECTIONS, descriptors - SPARE_DESCRIPTORS))
        server.config.http_protocol_class = guarded(server.config.http_protocol_class, most=most)
        server.config.ws_protocol_class = None  # a WebSocket's handshake is a request like any other, and refused as one


def guarded(base: Any, *, most: int, head_seconds: float = HEAD_SECONDS, most_headers: int = MOST_HEADERS) -> Any:
    """uvicorn's protocol class `base` with the limits; `most` connections at once."""
    idle: dict[Any, None] = {}  # connections without a request in progress, those silent for longest first

    class Guarded(base):
        """A connection."""

        _timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._rest()
            self._wait_for_head()
            if len(self.server_state.connections) > most:
                longest_silent = next(iter(idle))
                del idle[longest_silent]  # it is lost a moment later, and must not be chosen again until then
                longest_silent.transport.abort()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._work()
            elif self in idle and not self.transport.is_closing():
                self._wait_for_head()
                self._head_bytes += len(data)
                if self._head_bytes > most_headers:
                    self.transport.write(TOO_LARGE)
                    self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # no next request was waiting in line
                self._rest()

        def connection_lost(self, exc: Exception | None) -> None:
            self._work()
            super().connection_lost(exc)

        def _rest(self) -> None:
            idle[self] = None
            self._head_bytes = 0

        def _work(self) -> None:
            idle.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _wait_for_head(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(head_seconds, self.transport.close)

    return Guarded
