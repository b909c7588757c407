"""Prompts that are read while training goes on, a window of neighbouring rows at a time.

The order is a function of (seed, pass, position), as that of prompts that lie in memory: windows follow each other as the rows do, the same
in every pass, and within a window the prompts are shuffled by (seed, pass, window). So a run goes on at a position by passing over what
comes before it, and no state is kept of where it was. Memory holds the first window, the one in use, and where windows begin.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rloo_cli.data.order import permutation
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.data.row_streams import RowStream, StreamedSplit, Window
from rloo_cli.errors import DataError
from rloo_cli.types import Prompt

LOGGER = logging.getLogger(__name__)
KINDS = ("strings", "messages")

MakePrompts = Callable[[Window], PromptSet]
CheckRows = Callable[[Mapping[str, list[Any]]], Sequence[str]]
"""The columns of a window → what is to be told of them. Raises DataError where they cannot be used."""


class StreamedPrompts:
    """The prompts of a stream: `draw` by position in the endless order, and of `head`, its first window, whatever else is asked."""

    def __init__(self, split: StreamedSplit, make: MakePrompts, *, source: str, window_rows: int, drops: bool, longest: int | None) -> None:
        """Read the first window.

        Args:
            make: prompts of a window, checked; where it `drops` some, each window is made to learn how many are left.
            source: for messages.
            window_rows: rows of a window.
            longest: tokens that no prompt exceeds; None = not known.

        Raises:
            DataError: the first rows cannot be used, or there are none.
        """
        self.source = source
        self.extra_columns: tuple[str, ...] = ()
        """Columns that these prompts lack and others beside them have: None in each."""
        self.check_rows: CheckRows | None = None
        """What every window after the first is shown, once."""
        self._split, self._make, self._window_rows, self._drops, self._longest = split, make, window_rows, drops, longest
        self._lock = threading.Lock()  # a batch may be drawn ahead, in a thread of its own
        self._starts = array("q")
        """Prompts of a pass before each window, as far as they are known."""
        self._seen = 0
        """Prompts of those windows together."""
        self._size: int | None = None
        """Prompts of a pass, once it has ended."""
        self._checked = 1
        """Windows that were checked."""
        self._stream: RowStream = split.open()
        self._next = 0
        """The window that the stream gives next."""
        self._current, self._prompts = 0, self._read()
        if self._prompts is None or not len(self._prompts):
            why = (
                "holds no rows"
                if self._prompts is None
                else f"each of the first {window_rows:,} prompts is too long; raise data.max_prompt_length"
            )
            raise DataError(f"{source}: {why}.")
        self.head = self._prompts

    # --- by position -------------------------------------------------------------------------------------------------------------

    def draw(self, first: int, count: int, *, seed: int, shuffle: bool, check_stop: Callable[[], None]) -> list[Prompt]:
        """The prompts at `count` positions from `first` on.

        Raises:
            DataError: a row on the way cannot be used.
        """
        with self._lock:
            return [self._at(position, seed, shuffle, check_stop) for position in range(first, first + count)]

    def passes(self, position: int) -> float | None:
        """Passes that end before a position; None as long as no prompt of a second one was drawn: nobody has looked for the end of the first."""
        with self._lock:
            self._learn(position - 1, lambda: None)
            return None if self._size is None or position <= self._size else position / self._size

    def _at(self, position: int, seed: int, shuffle: bool, check_stop: Callable[[], None]) -> Prompt:
        self._learn(position, check_stop)
        number, place = (0, position) if self._size is None else divmod(position, self._size)
        window = bisect_right(self._starts, place) - 1
        prompts = self._window(window)
        index = place - self._starts[window]
        if shuffle:
            index = int(_order(len(prompts), seed, number, window)[index])
        prompt = prompts[index]
        columns = {**dict.fromkeys(self.columns), **prompt.columns}
        return replace(prompt, row=self._starts[window] + prompt.row, columns=columns)

    def _learn(self, position: int, check_stop: Callable[[], None]) -> None:
        """Go on until the window of a position of the first pass, or the end of that pass, is known."""
        while self._size is None and position >= self._seen:
            check_stop()
            if self._next != len(self._starts):
                self._open_at(len(self._starts))
            if not self._drops and position >= self._seen + self._window_rows:
                self._note(self._stream.skip(self._window_rows))
                self._next += 1
                continue
            number, prompts = self._next, self._read()
            if prompts is not None:
                self._current, self._prompts = number, prompts

    def _window(self, number: int) -> PromptSet:
        """The prompts of a window whose start is known."""
        if number != self._current or self._prompts is None:
            if self._next != number:
                self._open_at(number)
            self._current, self._prompts = number, self._read()
        if self._prompts is None:
            raise DataError(f"{self.source}: has fewer rows than a moment ago; leave the data alone while a run reads it.")
        return self._prompts

    def _open_at(self, number: int) -> None:
        """A new pass over the split, up to a window."""
        self._stream, self._next = self._split.open(), 0
        while self._next < number and self._stream.skip(self._window_rows):
            self._next += 1

    def _read(self) -> PromptSet | None:
        """The prompts of the stream's next window; None at the end."""
        window = self._stream.read(self._window_rows)
        number, self._next = self._next, self._next + 1
        if window is None:
            if number == len(self._starts):
                self._size = self._seen
            return None
        prompts = self._make(window)
        if number:
            self._check(number, prompts)
        if number == len(self._starts):
            self._starts.append(self._seen)
            self._seen += len(prompts)
        return prompts

    def _note(self, count: int) -> None:
        """A window of so many prompts, none of them left out, comes after those that are known; 0 = the end."""
        if not count:
            self._size = self._seen
            return
        self._starts.append(self._seen)
        self._seen += count

    def _check(self, number: int, prompts: PromptSet) -> None:
        if not len(prompts) or number < self._checked:
            return
        self._checked = number + 1
        first, last = prompts.place(0), prompts.place(len(prompts) - 1)
        if prompts.is_chat != self.head.is_chat:
            raise DataError(f"{first}: the prompts are {KINDS[prompts.is_chat]}, and {KINDS[self.head.is_chat]} before; keep to one kind.")
        if self.check_rows is None:
            return
        columns = {name: [None] * len(prompts) for name in (*self.head.columns, *self.extra_columns)}
        columns |= {name: prompts.column(name) for name in prompts.columns}
        try:
            notices = self.check_rows(columns)
        except DataError as error:
            raise DataError(f"{error.message} (row 0 is {first}, the last one {last})") from error
        for notice in notices:
            LOGGER.info("%s to %s: %s", first, last, notice)

    # --- what the first window tells -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int | None:
        """Prompts of a pass: not known beforehand."""
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column but the prompt."""
        return (*self.head.columns, *self.extra_columns)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may come; of the first window's, where nothing bounds them."""
        return self._longest if self._longest is not None else self.head.longest

    def parts(self) -> Sequence[Any]:
        """The sets that it is mixed of: itself."""
        return [self]

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the first window and the sizes of the files: all that is known without reading them."""
        return hashlib.sha256(f"{self._split.identity} {self.head.fingerprint}".encode()).hexdigest()


@lru_cache(maxsize=4)
def _order(count: int, seed: int, number: int, window: int) -> np.ndarray:
    return permutation(count, seed, number, window)
