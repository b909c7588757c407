"""metrics.jsonl as curves. It is read leniently: a report of a damaged run shows what can be read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.run.metrics import EVALUATION_PREFIX

MOST_POINTS = 800
"""Points of a curve that is drawn; longer ones are averaged in pieces of equal length."""
SHARE_OF_ENDS = 10
"""The beginning and the end of a run are a tenth of its steps each,"""
FEWEST_OF_ENDS = 3
"""but three steps at least, where there are so many."""
SMOOTHED_SHARE = 20
"""The thick line is the mean over a twentieth of the run around each step."""


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity by step; steps at which it does not exist are left out. Example: `Series((1.0, 2.0), (0.4, 0.5))`."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def head(self) -> float:
        """The mean of the beginning."""
        return _mean(self.values[: end_length(len(self.values))])

    @property
    def tail(self) -> float:
        """The mean of the end."""
        return _mean(self.values[-end_length(len(self.values)) :])

    def thinned(self, most: int = MOST_POINTS) -> Series:
        """At most `most` points: means over consecutive ones."""
        size = math.ceil(len(self.steps) / most)
        if size <= 1:
            return self
        pieces = range(0, len(self.steps), size)
        return Series(*(tuple(_mean(numbers[i : i + size]) for i in pieces) for numbers in (self.steps, self.values)))

    def smoothed(self) -> Series:
        """The centred moving mean, over fewer neighbours near the ends."""
        reach, count = smoothing_width(len(self.values)) // 2, len(self.values)
        totals = [0.0, *itertools.accumulate(self.values)]
        bounds = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
        smooth = [(totals[end] - totals[start]) / (end - start) for start, end in bounds] if reach else self.values
        return Series(self.steps, tuple(smooth))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The rows of a metrics.jsonl."""

    train: tuple[Mapping[str, float], ...]
    """A row an optimizer step, in order."""
    evaluations: tuple[Mapping[str, float], ...]
    """A row an evaluation; keys begin with `eval/`."""
    damaged_lines: int = 0
    """Lines that are no JSON object with a step."""

    @property
    def last_step(self) -> int:
        """The last optimizer step; 0 where there is none."""
        return int(self.train[-1]["step"]) if self.train else 0

    def series(self, key: str) -> Series:
        """One key by step: of evaluations where it begins with `eval/`."""
        rows = self.evaluations if key.startswith(EVALUATION_PREFIX) else self.train
        found = [(row["step"], row[key]) for row in rows if key in row]
        return Series(tuple(step for step, _ in found), tuple(value for _, value in found))

    def names(self) -> list[str]:
        """Every key that a row has, in order of appearance."""
        return list(dict.fromkeys(key for rows in (self.train, self.evaluations) for row in rows for key in row))

    def total(self, key: str) -> float:
        """The sum over all steps; steps without the key count 0."""
        return math.fsum(row.get(key, 0.0) for row in (*self.train, *self.evaluations))


def read_run_metrics(path: Path) -> RunMetrics:
    """The rows of a metrics.jsonl that can be read; none where there is no such file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        lines = []
    rows = [_row(line) for line in lines if line.strip()]
    whole = [row for row in rows if row is not None]
    return RunMetrics(
        train=tuple(_one_a_step(row for row in whole if not _is_evaluation(row))),
        evaluations=tuple(_one_a_step(row for row in whole if _is_evaluation(row))),
        damaged_lines=len(rows) - len(whole),
    )


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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    numbers = {key: float(value) for key, value in row.items() if _is_number(value)}
    return numbers if "step" in numbers else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # NaN and infinities are not below it


def _is_evaluation(row: Mapping[str, float]) -> bool:
    return any(key.startswith(EVALUATION_PREFIX) for key in row)


def _one_a_step(rows: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """In order of steps; of two rows of one step, the later."""
    latest = {row["step"]: row for row in rows}
    return [latest[step] for step in sorted(latest)]
