"""Length-prefixed JSON over a socket, between the trainer and what runs reward functions. No pickle: bytes from a worker are data."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

HEADER = struct.Struct("!Q")
MOST_ANSWER_BYTES = 256 * 2**20
"""A longer message from a worker is not read."""
CHUNK_BYTES = 1 << 18

_TAGGED: dict[type, tuple[str, Any, Any]] = {
    bytes: ("\0bytes", lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    datetime.datetime: ("\0datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("\0date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("\0time", datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: ("\0decimal", str, decimal.Decimal),
}
"""Types that data sets hold and JSON does not: tag, to text, from text."""
_FROM_TEXT = {tag: read for tag, _, read in _TAGGED.values()}


def _plain(value: Any) -> Any:
    if type(value) in _TAGGED:
        tag, write, _ = _TAGGED[type(value)]
        return {tag: write(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _untagged(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((tag, text),) = value.items()
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](text)
    return value


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_hook=_untagged)


def encode(message: Any) -> bytes:
    """The message with its length before it. Lone surrogates and NUL survive, as JSON escapes.

    Raises:
        TypeError: a value that JSON cannot hold; its text names the type.
    """
    body = _ENCODER.encode(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:
    """The message of one body. Raises ValueError where it is not JSON."""
    return _DECODER.decode(body.decode("ascii"))


def read_message(connection: socket.socket) -> Any:
    """The next message, waited for; None once the other side is gone."""
    header = _read_exactly(connection, HEADER.size)
    if header is None:
        return None
    body = _read_exactly(connection, HEADER.unpack(header)[0])
    return None if body is None else decode(body)


def read_message_with_fd(connection: socket.socket) -> tuple[Any, int | None]:
    """The next message and the file descriptor sent along with it, if any; (None, None) once the other side is gone."""
    header, fds, _, _ = socket.recv_fds(connection, HEADER.size, 1)
    rest = _read_exactly(connection, HEADER.size - len(header)) if header else None
    body = _read_exactly(connection, HEADER.unpack(header + rest)[0]) if rest is not None else None
    return (None, None) if body is None else (decode(body), fds[0] if fds else None)


def _read_exactly(connection: socket.socket, length: int) -> bytearray | None:
    body = bytearray(length)
    view, position = memoryview(body), 0
    while position < length:
        try:
            count = connection.recv_into(view[position:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        position += count
    return body


class Channel:
    """The trainer's end of a connection; nothing here waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_open = True
        self.fault: str | None = None
        """Why nothing more can be read."""
        self._unsent = bytearray()
        self._unread = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits for the other side to read."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send an encoded message; what does not fit now is sent by later calls of `flush`."""
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Send what the other side has room for."""
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    count = self.connection.send(view[:CHUNK_BYTES])
                del self._unsent[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # its end is told by whoever watches the process

    def receive(self) -> list[Any]:
        """Every complete message that has arrived, up to the first that cannot be read; `fault` then says so."""
        try:
            while self.fault is None and (chunk := self.connection.recv(CHUNK_BYTES)):
                self._unread += chunk
                if len(self._unread) > MOST_ANSWER_BYTES + HEADER.size:
                    self.fault = f"an answer of more than {MOST_ANSWER_BYTES} bytes"
            self.is_open = False
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_open = False
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> dict[str, Any] | None:
        if len(self._unread) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._unread)[0]
        if end > MOST_ANSWER_BYTES:
            self.fault = f"an answer of {end} bytes"
        if self.fault is not None or len(self._unread) < end:
            return None
        body = self._unread[HEADER.size : end]
        del self._unread[:end]
        try:
            message = decode(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.fault = "an answer that cannot be read"
            return None
        return message

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.connection.close()
