"""A time during which a server fails: it is tried again, ever less often, until a budget is spent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from rloo_cli.errors import EngineError
from rloo_cli.rollout.server_client import TransientFault

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0
"""Seconds between two tries; doubled each time."""
FIRST_WORD, WORD_EVERY = 2.0, 30.0
"""Seconds after which a wait is told on the terminal, and how often."""


class Outage:
    """Counts from the first fault; `reset` when something went well."""

    def __init__(self, address: str, budget: float, setting: str, say: Callable[[str], None]) -> None:
        """`setting` names the recipe's field with the budget, for the message at its end."""
        self._address, self._budget, self._setting, self._say = address, budget, setting, say
        self.reset()

    def reset(self) -> None:
        """The server answers again."""
        self._since: float | None = None
        self._pause = FIRST_PAUSE
        self._next_word = FIRST_WORD

    @property
    def is_on(self) -> bool:
        """Whether the last try failed."""
        return self._since is not None

    async def wait(self, fault: TransientFault) -> None:
        """Pause before the next try.

        Raises:
            EngineError: the budget is spent; the fault is its cause.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.info("vLLM server %s: %s", self._address, fault.cause)
        gone = now - self._since
        if gone >= self._budget:
            raise EngineError(
                f"vLLM server {self._address}: {fault.cause}; tried for {gone:.0f} s ({self._setting}: {self._budget:g}). "
                "Look whether `rloo vllm-serve` runs there, and at its output"
            ) from fault
        if gone >= self._next_word:
            self._say(f"waiting for the vLLM server at {self._address}: {fault.cause} ({gone:.0f} s of {self._budget:g} s)")
            self._next_word = gone + WORD_EVERY
        await asyncio.sleep(min(self._pause, self._budget - gone))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
