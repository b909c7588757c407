"""Whether the server generates: one token, asked for over HTTP as a trainer does. /health can be 200 with a dead engine."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable

from rloo_cli.serving.address import Address

TOKEN_SECONDS = 120.0
"""For the first token, which may have to wait for kernels to be compiled."""
PAUSE_SECONDS = 0.25
ROUTE = "/inference/v1/generate"
BODY = json.dumps({"token_ids": [0], "sampling_params": {"n": 1, "max_tokens": 1, "temperature": 0.0, "detokenize": False}}).encode()


def one_token(address: Address, key: str | None, *, seconds: float = TOKEN_SECONDS) -> str | None:
    """None when a token came; otherwise what happened instead."""
    connection = http.client.HTTPConnection(address.near, address.port, timeout=seconds)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", ROUTE, BODY, headers)
        response = connection.getresponse()
        text = response.read(1 << 20)
        if response.status != 200:
            return f"HTTP {response.status}: {text[:200].decode('utf-8', 'replace')}"
        return None if json.loads(text)["choices"][0]["token_ids"] else "an answer without a token"
    except ConnectionRefusedError:
        return "nothing listens yet"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


class Readiness:
    """Asks for a token again and again in a thread until one comes; `ready` tells."""

    def __init__(self, ask: Callable[[], str | None]) -> None:
        self._ask = ask
        self._done = threading.Event()
        self.ready = threading.Event()
        self.answer = ""
        """What came instead of a token, last time."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="readiness")
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._done.set()

    def _run(self) -> None:
        while not self._done.is_set():
            problem = self._ask()
            if problem is None:
                self.ready.set()
                return
            self.answer = problem
            time.sleep(PAUSE_SECONDS)
