"""HTTP to a vLLM server: a deadline on every answer, bodies with a cap, no redirects, and two kinds of failure.

    TransientFault   worth another try: connection lost, no answer in time, 429, 500, 503, an answer that is no JSON
    EngineError      would fail again: a wrong key, a route that does not exist, a redirect, an answer without end

Everything runs on one event loop in the caller's thread, so that a wait can be left at any time and nothing goes on behind it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rloo_cli.errors import EngineError, RecipeError

CONNECT_SECONDS = 5.0
CONTROL_SECONDS = 10.0
"""For an answer that costs the server nothing."""
CONTROL_BYTES = 1 << 20
MAX_CONNECTIONS = 256
"""As many groups as a stock vLLM decodes sequences at once; further ones wait on this side."""
SHOWN = 300  # characters of a server's own message
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}


class TransientFault(Exception):
    """Something that may be gone at the next try. Never leaves the engine: it ends as an EngineError when the time is spent."""

    def __init__(self, cause: str, *, status: int | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        """Of the HTTP answer that declined; None = there was no whole answer."""


class LeaseTakenError(Exception):
    """Another trainer holds the server."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


def check_address(base_url: str) -> str:
    """The address without a slash at its end.

    Raises:
        RecipeError: it is none, or has a name or password in it, which messages and logs would show.
    """
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise RecipeError(f"vllm_server_base_url: {base_url!r:.100} is no address ({error}); such as http://127.0.0.1:8000") from error
    if parts.username or parts.password:
        raise RecipeError("vllm_server_base_url: a name or password stands in it; give the key by vllm_server_key_file or RLOO_VLLM_KEY")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise RecipeError(f"vllm_server_base_url: {base_url!r:.100} is no address; such as http://127.0.0.1:8000")
    return base_url.rstrip("/")


class ServerClient:
    """Requests to one server; see the module for what they raise."""

    def __init__(self, base_url: str, key: str | None) -> None:
        self.address = check_address(base_url)
        headers = {"accept-encoding": "identity"}
        if key:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise RecipeError(
                    "the vLLM server's key has blanks or characters beyond ASCII in it; look at vllm_server_key_file or RLOO_VLLM_KEY"
                )
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
            trust_env=False,  # no proxy of the environment, no .netrc: the key goes to this address alone
            follow_redirects=False,
        )

    async def call(
        self, method: str, path: str, body: Any = None, *, seconds: float | None = CONTROL_SECONDS, max_bytes: int = CONTROL_BYTES
    ) -> Any:
        """The JSON document that the server answers within `seconds`, first to last byte; None = the caller watches the time.

        Raises:
            TransientFault, EngineError: see the module.
            LeaseTakenError: 409 of the lease.
        """
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, self.address + path, json=body) as response:
                content = await self._content(response, path, max_bytes)
        except TimeoutError as error:
            raise TransientFault(f"no answer to {method} {path} within {seconds:g} s") from error
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise TransientFault(_connection_words(error)) from error
        return self._judge(response, path, content)

    async def close(self) -> None:
        """Close all connections; requests that are under way are cut, which makes the server give up on them."""
        await self._http.aclose()

    async def _content(self, response: httpx2.Response, path: str, max_bytes: int) -> bytes:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise EngineError(f"vLLM server {self.address} answered {path} in the encoding {encoding!r:.40}, which was not asked for")
        parts, size = [], 0
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise EngineError(
                    f"vLLM server {self.address} answered {path} with more than {max_bytes / 2**20:.1f} MiB, which no right answer has; "
                    "look at what listens there"
                )
        return b"".join(parts)

    def _judge(self, response: httpx2.Response, path: str, content: bytes) -> Any:
        status = response.status_code
        if 300 <= status < 400:
            target = urlsplit(response.headers.get("location", "")).netloc or "elsewhere"
            raise EngineError(
                f"vLLM server {self.address} redirects {path} to {target:.100}; redirects are not followed: "
                "give the server's own address as vllm_server_base_url"
            )
        if status in (401, 403):
            raise EngineError(
                f"vLLM server {self.address} refused our key (HTTP {status}): give the server's key in the file that vllm_server_key_file "
                "names, or in the environment variable RLOO_VLLM_KEY"
            )
        if status in TRANSIENT_STATUS:
            raise TransientFault(f"HTTP {status} to {path}{_message(content)}", status=status)
        document = self._json(path, content, status)
        if status == 409 and path == "/rloo/lease":
            raise LeaseTakenError(_lease_owner(document))
        if status != 200:
            raise EngineError(f"vLLM server {self.address} answered HTTP {status} to {path}{_message(content)}")
        return document

    def _json(self, path: str, content: bytes, status: int) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            if status != 200:
                return None
            raise TransientFault(f"the answer to {path} is no JSON ({len(content)} bytes)") from error


def leave(*futures: asyncio.Future[Any]) -> None:
    """Wait no longer for these, whatever they come to."""
    for future in futures:
        future.cancel()
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _connection_words(error: Exception) -> str:
    """What happened to the connection, in a few words."""
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection within {CONNECT_SECONDS:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())[:SHOWN]
    kind = "no connection" if isinstance(error, httpx2.ConnectError) else "connection lost"
    return f"{kind} ({text})" if text else kind


def _message(content: bytes) -> str:
    """The server's own words in an error's body, on one line, after a colon; empty where there are none."""
    text = content.decode(errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        inner = document.get("error", document.get("detail", text))
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return f": {text[:SHOWN]}" if text else ""


def _lease_owner(document: Any) -> str:
    lease = document.get("lease", document) if isinstance(document, dict) else None
    owner = lease.get("owner") if isinstance(lease, dict) else None
    return owner[:SHOWN] if isinstance(owner, str) else "another trainer"
