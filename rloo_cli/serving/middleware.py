"""What stands before every request to vLLM: the key, the list of open routes, and limits on what a client may send.

vLLM guards /v1 and /inference with its own key and leaves /update_weights, /collective_rpc and the like open, so that whoever reaches
the port owns the model. `Gate`, given to vLLM's --middleware, is asked first about everything:

    key        a request without it is answered 401, whatever it asks for: any path, any method, websockets too
    routes     what the trainer needs, in OPEN; all else is 404, also with the key
    browsers   403: a page that somebody opens on this machine can reach the loopback, but its requests say where they come from
    body       read whole before vLLM sees it: at most MOST_BODY bytes (LARGE_ROUTES), within BODY_SECONDS; all of them together MOST_HELD
    headers    at most MOST_HEADERS bytes, and a time limit, in serving/connections.py
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from rloo_cli.serving.command import KEY_VARIABLE
from rloo_cli.serving.connections import MOST_HEADERS, guard_connections
from rloo_cli.serving.routes import Routes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OWN = frozenset({("GET", "/rloo/info"), ("POST", "/rloo/lease"), ("DELETE", "/rloo/lease"), ("POST", "/rloo/weights_version")})
OPEN = OWN | {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/inference/v1/abort_requests"),
    ("GET", "/is_paused"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/get_world_size"),
    ("GET", "/weight_info"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/shutdown_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/reset_prefix_cache"),
}
"""(method, path) of what is served. Among the closed: /collective_rpc (calls any method of a worker), /sleep, /wake_up,
/release_kv_cache_memory, /abort_requests (all of them), /weight_checker (can reset the weights), /server_info (the environment),
/start_profile, /scale_elastic_ep, /v1/load_lora_adapter, chat and its fetching of URLs, documentation, websockets."""

LARGE_ROUTES = ("/v1/completions", "/inference/v1/generate")
MOST_BODY = 128 << 20
"""Bytes on the large routes: 16 million token ids. Weights do not come by HTTP."""
MOST_CONTROL_BODY = 8 << 20
"""Bytes elsewhere: the names and shapes of 50,000 tensors."""
MOST_HELD = 512 << 20
"""Bytes of all bodies that are being read or worked on."""
BODY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much, and for how long."""

    body: int = MOST_BODY
    control_body: int = MOST_CONTROL_BODY
    held: int = MOST_HELD
    body_seconds: float = BODY_SECONDS

    def body_of(self, path: str) -> int:
        """Bytes that a body for this path may have."""
        return self.body if path in LARGE_ROUTES else self.control_body


class Refusal(Exception):
    """The request is answered with this status and nothing else."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class Gone(Exception):
    """The client left."""


class Gate:
    """An ASGI application around vLLM's. The key comes from the environment variable RLOO_VLLM_KEY; without one there is none to show."""

    def __init__(self, app: App, *, key: str | None = None, limits: Limits | None = None) -> None:
        self._app = app
        given = key if key is not None else os.environ.get(KEY_VARIABLE)
        self._digest = _digest(given.encode()) if given else None
        self._limits = limits or Limits()
        self._routes = Routes()
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand over to vLLM."""
        if scope["type"] == "lifespan":
            guard_connections(scope.get("app"))
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, send, 404 if self._opens(scope) else 401)
        else:
            try:
                await self._handle(scope, receive, send)
            except Refusal as refusal:
                await _answer(send, refusal.status, {"error": refusal.why}, close=True)
            except Gone:
                pass

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        body = bytearray()
        try:
            await self._read(scope, receive, body)
            if (scope["method"], scope["path"]) in OWN:
                await _answer(send, *await self._routes.answer(scope["method"], scope["path"], bytes(body), scope["app"].state))
            else:
                await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._held -= len(body)

    def _check(self, scope: Scope) -> None:
        """Raise Refusal for what the head of the request is enough to refuse."""
        if not self._opens(scope):
            raise Refusal(401, "this server needs its key: Authorization: Bearer KEY")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            raise Refusal(431, f"headers of more than {MOST_HEADERS} bytes")
        if _header(scope, b"origin"):
            raise Refusal(403, "browsers are not served")
        if (scope["method"], scope["path"]) not in OPEN:
            raise Refusal(404, "`rloo vllm-serve` does not serve this route")
        length = b"".join(_header(scope, b"content-length"))
        if length.isdigit() and int(length) > self._limits.body_of(scope["path"]):
            raise Refusal(413, f"a body of more than {self._limits.body_of(scope['path'])} bytes")

    def _opens(self, scope: Scope) -> bool:
        """Whether the request carries the key; the time that takes tells nothing of how much of it was right."""
        if self._digest is None:
            return True
        given = _header(scope, b"authorization")
        scheme, _, word = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return hmac.compare_digest(_digest(word), self._digest) and scheme.lower() == b"bearer"

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        """Read the whole body into `body`, whose bytes are counted as held."""
        most = self._limits.body_of(scope["path"])
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    chunk = message.get("body", b"")
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > most:
                        raise Refusal(413, f"a body of more than {most} bytes")
                    if self._held > self._limits.held:
                        raise Refusal(503, "too many large requests at once: try again")
                    if not message.get("more_body", False):
                        return
        except TimeoutError as error:
            raise Refusal(408, f"the body did not come within {self._limits.body_seconds:g} s") from error


def _digest(word: bytes) -> bytes:
    return hashlib.sha256(word).digest()


def _header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for given, value in scope["headers"] if given.lower() == name]


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body at once, and then what comes after it: the client's leaving."""
    rest = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def read() -> Message:
        for message in rest:
            return message
        return await receive()

    return read


async def _answer(send: Send, status: int, document: dict[str, Any], *, close: bool = False) -> None:
    """Send JSON; `close` ends the connection, whatever else the client wanted to send."""
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    headers += [(b"connection", b"close")] if close else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse_websocket(scope: Scope, send: Send, status: int) -> None:
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "websocket.http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1008})
