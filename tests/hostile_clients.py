"""Clients that mean no good, and what a server answered them: raw sockets, so that no library corrects what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import time

TOKEN_BODY = json.dumps({"token_ids": [65, 66], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False}}).encode()
GENERATE = "/inference/v1/generate"


def ask(port, path, key=None, *, method="GET", body=None, headers=None, seconds=10.0):
    """(status, document) of a decent request; document is None where the answer is no JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    given = dict(headers or {})
    if key is not None:
        given["Authorization"] = f"Bearer {key}"
    if body is not None:
        given.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body, given)
        response = connection.getresponse()
        text = response.read()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, None
    finally:
        connection.close()


def one_token(port, key=None, *, seconds=20.0):
    """Whether a valid request still gets its token."""
    status, document = ask(port, GENERATE, key, method="POST", body=TOKEN_BODY, seconds=seconds)
    return status == 200 and len(document["choices"][0]["token_ids"]) == 1


def raw(port, *pieces, seconds=10.0):
    """The status that bytes were answered with; None where the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in answer and (piece := connection.recv(4096)):
                answer += piece
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


def head(method, path, key=None, *lines):
    """The head of a request."""
    given = [f"{method} {path} HTTP/1.1", "Host: x", *lines, *([f"Authorization: Bearer {key}"] if key else [])]
    return ("\r\n".join(given) + "\r\n\r\n").encode("latin-1")


def websocket(port, path, key=None):
    """The status that a WebSocket handshake was answered with."""
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    return raw(port, head("GET", path, key, *lines))


def large_header(port, key, size=1 << 20):
    """The status that a header of this size was answered with, sent in pieces that never end the head."""
    return raw(port, f"GET /health HTTP/1.1\r\nAuthorization: Bearer {key}\r\nX: ".encode(), *[b"x" * 4096] * (size // 4096), b"\r\n\r\n")


def large_body(port, key, size, path="/rloo/lease"):
    """The statuses of a body that says how large it is, and of one in chunks that does not."""
    told = raw(port, head("POST", path, key, f"Content-Length: {size}"), b"x" * 65536)
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    untold = raw(port, head("POST", path, key, "Transfer-Encoding: chunked"), *[chunk] * (size // 65536 + 1))
    return told, untold


def garbage(port, rounds=50, seed=0):
    """Send bytes that are no HTTP; nothing comes back, whatever is answered."""
    source = random.Random(seed)
    starts = [
        b"",
        b"\0",
        b"\x16\x03\x01\x02\x00",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\r\n" * 1000,
    ]
    starts += [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: \xff\r\n\r\n",
    ]
    starts += [
        b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    ]
    for i in range(rounds):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, contextlib.suppress(OSError):
            connection.sendall(starts[i % len(starts)] + source.randbytes(source.randrange(2000)))
            connection.settimeout(0.05)
            connection.recv(1000)


@contextlib.contextmanager
def slow_connections(port, key, count=100):
    """While the block runs, `count` connections hang: half of them in the head of a request, half in its body."""
    body = head("POST", GENERATE, key, "Content-Type: application/json", "Content-Length: 1000") + b'{"to'
    with contextlib.ExitStack() as stack:
        connections = []
        for i in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            connection.sendall(b"GET /hea" if i % 2 else body)
            connections.append(connection)
        yield connections


def seconds_until_closed(connection, seconds):
    """How long the server let this connection hang; None: longer than that."""
    started = time.monotonic()
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return None
    except ConnectionError:
        pass
    return time.monotonic() - started


def thousand_at_once(port, key, count=1000, seconds=60.0):
    """The statuses of as many requests, each on a connection of its own, all open before the first is sent."""

    async def one(gate):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await gate.wait()
        writer.write(head("GET", "/health", key, "Connection: close"))
        try:
            return int((await reader.readline()).split()[1])
        except (ConnectionError, IndexError):
            return None
        finally:
            writer.close()

    async def all_of_them():
        gate = asyncio.Barrier(count)
        return await asyncio.gather(*(one(gate) for _ in range(count)), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(all_of_them(), seconds))
