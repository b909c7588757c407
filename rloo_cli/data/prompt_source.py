"""What training draws prompts from: a set that lies in memory, a stream, or a mixture of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.types import Prompt


class PromptSource(Protocol):
    """Prompts in an endless order that is a function of (seed, position), the same for any number of processes."""

    def draw(self, first: int, count: int, *, seed: int, shuffle: bool, check_stop: Callable[[], None]) -> list[Prompt]:
        """The prompts at `count` positions from `first` on; `check_stop` is called on the way and raises to give up."""
        ...

    def passes(self, position: int) -> float | None:
        """Passes over the prompts that end before a position, the last one in part where it is known how long it is."""
        ...

    @property
    def source(self) -> str:
        """Where the prompts come from, for messages."""
        ...

    @property
    def size(self) -> int | None:
        """Prompts of one pass; None where nobody knows."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may come, as far as that is known."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column but the prompt: what reward functions may ask for by name."""
        ...

    @property
    def head(self) -> PromptSet:
        """The prompts that are there before training begins: all of them, the first window of a stream, the first set of a mixture."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) that tells the data from other data."""
        ...

    def parts(self) -> Sequence[Any]:
        """The sets that it is mixed of, each a PromptSource."""
        ...
