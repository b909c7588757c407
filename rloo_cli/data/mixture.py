"""Several sets of prompts as one: every row once a pass, or each set as often as its weight says.

With weights the set of each position is drawn at random, by (seed, position) alone; the set then gives its own next prompt. How many
prompts of each set come before a position follows from the draws before it, so a run goes on anywhere without any state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from rloo_cli.data.order import prompt_row, raw_bits
from rloo_cli.data.prompt_set import PROMPTS_AT_ONCE, PromptSet
from rloo_cli.data.streamed_prompts import StreamedPrompts
from rloo_cli.types import Prompt

if TYPE_CHECKING:
    from rloo_cli.data.prompt_source import PromptSource

BLOCK = 4096
"""Positions whose sets are drawn together."""
STREAM = 0x6D6978
"""Tells these random numbers from those of the order within a set."""


class Mixture:
    """The prompts of several sets: `draw` by position, and, of sets that lie in memory, `len()` and `[index]`, set after set."""

    def __init__(self, sets: Sequence[PromptSource], weights: Sequence[float] | None) -> None:
        """`weights`: one a set; None = every row once a pass, which takes sets that lie in memory."""
        self.sets = list(sets)
        self._shares = None if weights is None else np.cumsum(np.array(weights) / sum(weights))
        self.columns = tuple(dict.fromkeys(name for part in sets for name in head_of(part).columns))
        for part in self.sets:
            if isinstance(part, StreamedPrompts):
                part.extra_columns = tuple(name for name in self.columns if name not in part.head.columns)
        self._firsts = [0, *accumulate(part.size or 0 for part in self.sets)]

    # --- by position -------------------------------------------------------------------------------------------------------------

    def draw(self, first: int, count: int, *, seed: int, shuffle: bool, check_stop: Callable[[], None]) -> list[Prompt]:
        """The prompts at `count` positions of the endless order from `first` on. Raises DataError as a streamed set does."""
        if self._shares is None:
            found: list[Prompt] = []
            for position in range(first, first + count):
                if len(found) % PROMPTS_AT_ONCE == 0:
                    check_stop()
                found.append(self[prompt_row(position, num_prompts=len(self), seed=seed, shuffle=shuffle)])
            return found
        chosen, before = self._chosen(first, count, seed)
        drawn = []
        for i, part in enumerate(self.sets):
            own_seed = seed + (i << 64)  # or sets of the same length would be shuffled alike
            prompts = part.draw(before[i], int((chosen == i).sum()), seed=own_seed, shuffle=shuffle, check_stop=check_stop)
            drawn.append(iter([self._renumbered(i, prompt) for prompt in prompts]))
        return [next(drawn[i]) for i in chosen]

    def _chosen(self, first: int, count: int, seed: int) -> tuple[np.ndarray, list[int]]:
        """(the set of each position, how many prompts of each set come before the first of them)."""
        assert self._shares is not None
        shares, block = tuple(self._shares), first // BLOCK
        before = sum((_counts(shares, seed, b) for b in range(block)), np.zeros(len(shares), np.int64))
        blocks = [_sets(shares, seed, b) for b in range(block, (first + count - 1) // BLOCK + 1)]
        sets = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
        start = first - block * BLOCK
        before = before + np.bincount(sets[:start], minlength=len(shares))
        return sets[start : start + count], [int(n) for n in before]

    def _renumbered(self, i: int, prompt: Prompt) -> Prompt:
        """The prompt with a row number of the mixture: after the sets before it, or where sizes are not known every S-th number."""
        is_known = all(part.size is not None for part in self.sets)
        row = self._firsts[i] + prompt.row if is_known else prompt.row * len(self.sets) + i
        return replace(prompt, row=row, columns={**dict.fromkeys(self.columns), **prompt.columns})

    def passes(self, position: int) -> float | None:
        """Passes that end before a position: as many prompts as the sets have together; None where that is not known."""
        return None if self.size is None else position / self.size

    # --- as a whole --------------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int | None:
        """Prompts of one pass; None where a set is streamed."""
        return None if any(part.size is None for part in self.sets) else self._firsts[-1]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        i = next(i for i in range(len(self.sets)) if index < self._firsts[i + 1])
        return self._renumbered(i, head_of(self.sets[i])[index - self._firsts[i]])

    @property
    def head(self) -> PromptSet:
        """What is looked at of the prompts before training: of the first set."""
        return head_of(self.sets[0])

    @property
    def source(self) -> str:
        """Where the prompts come from, for messages."""
        return " + ".join(part.source for part in self.sets)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may come."""
        return max(part.longest for part in self.sets)

    def parts(self) -> Sequence[PromptSource]:
        """The sets."""
        return self.sets

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over those of the sets, and how they are mixed."""
        shares = None if self._shares is None else [f"{share:.12f}" for share in self._shares]
        return hashlib.sha256(repr((shares, [part.fingerprint for part in self.sets])).encode()).hexdigest()


def head_of(part: PromptSource) -> PromptSet:
    """The set itself, or the first window of a stream."""
    return part if isinstance(part, PromptSet) else part.head


def columns_of(part: PromptSource, names: Sequence[str]) -> Mapping[str, list[Any]]:
    """Values of these columns, one a prompt that is known; None in those that the set lacks."""
    head = head_of(part)
    return {name: head.column(name) if name in head.columns else [None] * len(head) for name in names}


@lru_cache(maxsize=8)
def _sets(shares: tuple[float, ...], seed: int, block: int) -> np.ndarray:
    """The set of each position of a block, int64 of shape (BLOCK,)."""
    uniform = raw_bits(BLOCK, seed, STREAM, block).astype(np.float64) / 2.0**64
    return np.minimum(np.searchsorted(np.array(shares), uniform, side="right"), len(shares) - 1)


@lru_cache(maxsize=1 << 16)
def _counts(shares: tuple[float, ...], seed: int, block: int) -> np.ndarray:
    return np.bincount(_sets(shares, seed, block), minlength=len(shares))
