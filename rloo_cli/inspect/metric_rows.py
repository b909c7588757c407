"""metrics.jsonl read leniently: of a damaged file, or one that is just being written, whatever rows can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.inspect.series import Series
from rloo_cli.run.metrics import EVALUATION_PREFIX

LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """What was read."""

    train: tuple[Mapping[str, float], ...] = ()
    """A row an optimizer step, in order; of two rows of one step the later."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    """Likewise; their keys begin with `eval/`."""
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
        """The sum over all rows; those without the key count 0."""
        return math.fsum(row.get(key, 0.0) for row in (*self.train, *self.evaluations))


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
