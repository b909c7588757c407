"""A quantity over the steps of a run: its ends, its best value, as fewer points, smoothed, as a line of bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 800
"""Points of a curve that is drawn; longer ones are averaged in pieces of equal length."""
SHARE_OF_ENDS = 10
"""The beginning and the end of a run are a tenth of its steps each,"""
FEWEST_OF_ENDS = 3
"""but three steps at least, where there are so many."""
SMOOTHED_SHARE = 20
"""The thick line is the mean over a twentieth of the run around each step."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity by step; steps at which it does not exist are left out. Example: `Series((1.0, 2.0), (0.4, 0.5))`."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def head(self) -> float:
        """The mean of the beginning; NaN of no values."""
        return mean(self.values[: end_length(len(self.values))])

    @property
    def tail(self) -> float:
        """The mean of the end; NaN of no values."""
        return mean(self.values[-end_length(len(self.values)) :])

    def best(self, *, greater: bool = True) -> tuple[int, float] | None:
        """(step, value) of the best one, of equals the earlier; None of no values."""
        points = zip(self.steps, self.values, strict=True)
        found = max(points, key=lambda point: (point[1] if greater else -point[1], -point[0]), default=None)
        return None if found is None else (int(found[0]), found[1])

    def thinned(self, most: int = MOST_POINTS) -> Series:
        """At most `most` points: means over consecutive ones."""
        size = math.ceil(len(self.steps) / most)
        if size <= 1:
            return self
        pieces = range(0, len(self.steps), size)
        return Series(*(tuple(mean(numbers[i : i + size]) for i in pieces) for numbers in (self.steps, self.values)))

    def smoothed(self) -> Series:
        """The centred moving mean, over fewer neighbours near the ends."""
        reach, count = smoothing_width(len(self.values)) // 2, len(self.values)
        totals = [0.0, *itertools.accumulate(self.values)]
        bounds = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
        smooth = [(totals[end] - totals[start]) / (end - start) for start, end in bounds] if reach else self.values
        return Series(self.steps, tuple(smooth))


def end_length(count: int) -> int:
    """How many of `count` steps are the beginning, and how many the end.

    >>> end_length(80), end_length(12), end_length(2)
    (8, 3, 2)
    """
    return min(count, max(FEWEST_OF_ENDS, count // SHARE_OF_ENDS))


def smoothing_width(count: int) -> int:
    """How many steps the thick line averages over: odd, 1 for short runs.

    >>> smoothing_width(80), smoothing_width(500), smoothing_width(12)
    (5, 25, 1)
    """
    return count // SMOOTHED_SHARE // 2 * 2 + 1


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A curve as a line of bars from its smallest value to its largest; longer ones are averaged in pieces.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([])
    ('▁▃▆█', '▄▄', '')
    """
    count = min(width, len(values))
    pieces = [mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    low, high = min(pieces, default=0.0), max(pieces, default=0.0)
    if high == low:
        return BARS[3] * count
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in pieces)


def mean(values: Sequence[float]) -> float:
    """NaN of no values."""
    return math.fsum(values) / len(values) if values else math.nan
