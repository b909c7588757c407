"""metrics.jsonl read leniently: of a damaged file, or one that is just being written, whatever rows can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.run.metrics import EVALUATION_PREFIX

BARS = "▁▂▃▄▅▆▇█"
SHARE_OF_ENDS = 10
"""The end of a run is the last tenth of its steps."""
FEWEST_OF_ENDS = 3
LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """What was read."""

    train: tuple[Mapping[str, float], ...] = ()
    """A row an optimizer step, in order; of two rows of one step the later."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    """Likewise; their keys begin with `eval/`."""
    damaged_lines: int = 0

    @property
    def last_step(self) -> int:
        """0 where there is no training step."""
        return int(self.train[-1]["step"]) if self.train else 0

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of the rows that have the key."""
        rows = self.evaluations if key.startswith(EVALUATION_PREFIX) else self.train
        return [(int(row["step"]), row[key]) for row in rows if key in row]

    def values(self, key: str) -> list[float]:
        """The values of a key, in order."""
        return [value for _, value in self.points(key)]

    def last(self, key: str) -> float | None:
        """The last value."""
        return values[-1] if (values := self.values(key)) else None

    def end(self, key: str) -> float | None:
        """The mean over the last tenth, three steps at least."""
        values = self.values(key)
        return mean(values[-min(len(values), max(FEWEST_OF_ENDS, len(values) // SHARE_OF_ENDS)) :]) if values else None

    def best(self, key: str, *, greater: bool = True) -> tuple[int, float] | None:
        """(step, value) of the best one; of equals the earlier."""
        points = self.points(key)
        return max(points, key=lambda point: (point[1] if greater else -point[1], -point[0])) if points else None


def read_metric_rows(path: Path) -> MetricRows:
    """The rows of the file that can be read; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return MetricRows()
    rows = [_row(line) for line in lines if line.strip()]
    whole = [row for row in rows if row is not None]
    return MetricRows(
        train=_one_a_step([row for row in whole if not _is_evaluation(row)]),
        evaluations=_one_a_step([row for row in whole if _is_evaluation(row)]),
        damaged_lines=len(rows) - len(whole),
    )


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
    """Of at least one value."""
    return math.fsum(values) / len(values)


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    numbers = {key: float(value) for key, value in row.items() if _is_number(value)}
    return numbers if 0 <= numbers.get("step", -1) < 1e15 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST  # NaN and infinities are not below it


def _is_evaluation(row: Mapping[str, float]) -> bool:
    return any(key.startswith(EVALUATION_PREFIX) for key in row)


def _one_a_step(rows: Sequence[dict[str, float]]) -> tuple[dict[str, float], ...]:
    latest = {row["step"]: row for row in rows}
    return tuple(latest[step] for step in sorted(latest))
