"""Which trainer has the server: one at a time, for as long as it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONGEST_SECONDS = 3600.0
LONGEST_OWNER = 1000
"""Characters."""


class Lease:
    """Held by one owner until it expires or is released; `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owner = ""
        self._ends = 0.0

    @property
    def owner(self) -> str | None:
        """Who holds it now."""
        return self._owner if self._owner and self._clock() < self._ends else None

    def take(self, owner: str, seconds: float) -> bool:
        """Whether `owner` holds it for these seconds from now: it was free, or already its own."""
        if self.owner not in (None, owner):
            return False
        self._owner, self._ends = owner, self._clock() + seconds
        return True

    def release(self, owner: str | None = None) -> bool:
        """Whether it is free now; None stands for whoever holds it."""
        if owner is not None and self.owner not in (None, owner):
            return False
        self._owner = ""
        return True

    def describe(self) -> dict[str, Any] | None:
        """The owner and the seconds left; None when it is free."""
        owner = self.owner
        return None if owner is None else {"owner": owner, "seconds_left": round(self._ends - self._clock(), 1)}
