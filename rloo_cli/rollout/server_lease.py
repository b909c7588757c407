"""The lease of a server, renewed in the background while the trainer does other things."""

from __future__ import annotations

import asyncio
import logging
import threading

from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import LeaseTakenError, ServerClient, TransientFault
from rloo_cli.rollout.server_handshake import LEASE_SECONDS, take_lease

logger = logging.getLogger(__name__)

RENEW_SECONDS = 20.0
RELEASE_SECONDS = 2.0


class LeaseKeeper:
    """Keeps one trainer's lease alive from a thread of its own, with a connection of its own."""

    def __init__(self, address: str, key: str | None, owner: str) -> None:
        self._address, self._key, self._owner = address, key, owner
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost_to: str | None = None

    async def take(self, client: ServerClient) -> None:
        """Take or renew it; see `server_handshake.take_lease`."""
        await take_lease(client, self._owner)
        self._lost_to = None

    def check(self) -> None:
        """Raise EngineError if another trainer has taken the server over."""
        if self._lost_to is not None:
            raise EngineError(
                f"vLLM server {self._address} was taken over by another trainer ({self._lost_to}) while this one did not renew its lease: "
                "end that one, then --resume"
            )

    def start(self) -> None:
        """Renew it from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, daemon=True, name="rloo-vllm-lease")
            self._thread.start()

    def stop(self) -> None:
        """Give it back, if the server still answers."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(RELEASE_SECONDS + 1)
            self._thread = None

    def _renew(self) -> None:
        loop = asyncio.new_event_loop()
        client = ServerClient(self._address, self._key)
        try:
            while not self._ended.wait(RENEW_SECONDS):
                loop.run_until_complete(self._call(client, "POST", {"owner": self._owner, "seconds": LEASE_SECONDS}))
            if self._lost_to is None:
                loop.run_until_complete(self._call(client, "DELETE", {"owner": self._owner}))
        finally:
            loop.run_until_complete(client.close())
            loop.close()

    async def _call(self, client: ServerClient, method: str, body: dict[str, object]) -> None:
        """Best effort: a server that is away has lost its leases too, and gets ours again when it is joined."""
        try:
            await client.call(method, "/rloo/lease", body, seconds=RELEASE_SECONDS)
        except LeaseTakenError as taken:
            self._lost_to = taken.owner
        except (TransientFault, EngineError) as fault:
            logger.debug("lease of vLLM server %s: %s", self._address, fault)
