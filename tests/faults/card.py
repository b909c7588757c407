"""The fault scorecard: which faults there are, how a row earns its five points, and the table that tells them.

A row is a function in a file `rows_*.py` beside this one, which is all it takes to be on the card:

    from card import fault

    @fault("A3", "ENOSPC in a checkpoint", quick=True)
    def enospc_in_a_checkpoint(bench):
        outcome = bench.train(inject=disk_full)                    # the program, in a forked child, with a fault in it
        bench.check(outcome, code=6, says=["000004", "free"])      # exit code, message, bounded time, nothing left behind
        bench.resume_is_gold(outcome)                              # nothing lost

`bench.py` tells what a Bench offers. A point is earned when at least one expectation of it was stated and all of them held, so a row
that never looks at a point does not have it. Heavy imports belong into the functions: the test runner imports these files for their
ids alone.
"""

from __future__ import annotations

import importlib
import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
POINTS = ("exit code", "message", "nothing lost", "bounded time", "nothing left behind")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the card."""

    id: str
    title: str
    row: Callable[..., None]
    quick: bool
    """Whether the default test suite runs it: a few seconds."""

    @property
    def order(self) -> tuple[str, int]:
        """Group, then number."""
        return self.id[0], int(self.id[1:])


@dataclass(kw_only=True)
class Result:
    """What a row earned."""

    id: str
    title: str
    seconds: float = 0.0
    stated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS, 0))
    misses: dict[str, list[str]] = field(default_factory=lambda: {point: [] for point in POINTS})
    figures: list[str] = field(default_factory=list)
    """What the row measured, a line each."""

    def expect(self, point: str, ok: bool, detail: str) -> bool:
        """State an expectation; `detail` says what was found, and is shown where it did not hold."""
        self.stated[point] += 1
        if not ok:
            self.misses[point].append(detail)
        return ok

    @property
    def points(self) -> int:
        """0 to 5."""
        return sum(bool(self.stated[point]) and not self.misses[point] for point in POINTS)

    def failures(self) -> list[str]:
        """A line for each miss, and for each point that the row never looked at."""
        unseen = [f"{point}: nothing was expected of it" for point in POINTS if not self.stated[point]]
        return [f"{point}: {detail}" for point in POINTS for detail in self.misses[point]] + unseen


_FAULTS: dict[str, Fault] = {}


def fault(name: str, title: str, *, quick: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Puts a row on the card: `@fault("A3", "ENOSPC in a checkpoint", quick=True)`."""

    def register(row: Callable[..., None]) -> Callable[..., None]:
        assert re.fullmatch(r"[A-Z]\d+", name), name
        assert name not in _FAULTS, f"{name} is there twice"
        _FAULTS[name] = Fault(id=name, title=title, row=row, quick=quick)
        return row

    return register


def all_faults() -> list[Fault]:
    """Every row of every `rows_*.py`, in order."""
    for file in sorted(HERE.glob("rows_*.py")):
        importlib.import_module(file.stem)
    return sorted(_FAULTS.values(), key=lambda entry: entry.order)


def chosen(names: Sequence[str], *, quick: bool = False) -> list[Fault]:
    """The rows of these ids and groups (`A`, `B1`); all for no name. ValueError for one that does not exist."""
    faults = all_faults()
    if unknown := [name for name in names if not any(name in (entry.id, entry.id[0]) for entry in faults)]:
        raise ValueError(f"no such row: {', '.join(unknown)}; there are {', '.join(entry.id for entry in faults)}")
    return [entry for entry in faults if (not names or entry.id in names or entry.id[0] in names) and (entry.quick or not quick)]


def run_row(entry: Fault, make_bench: Callable[[Result], object]) -> Result:
    """What a row earns; an exception in it costs every point."""
    result = Result(id=entry.id, title=entry.title)
    started = time.perf_counter()
    try:
        with make_bench(result) as bench:
            entry.row(bench)
    except Exception as error:  # noqa: BLE001 - one row must not cost the others theirs
        where = traceback.extract_tb(error.__traceback__)[-1]
        for point in POINTS:
            result.expect(
                point, False, f"the row itself failed: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )
    result.seconds = time.perf_counter() - started
    return result


def line(result: Result) -> str:
    """A row of the table for a terminal."""
    return f"{result.id:4} {result.title:78.78} {result.points}/{len(POINTS)} {result.seconds:7.1f} s"


def summary(results: Sequence[Result]) -> str:
    """Failures, figures, total."""
    lines = [f"  {result.id} {text}" for result in results for text in result.failures()]
    figures = [f"  {result.id} {text}" for result in results for text in result.figures]
    points, most = sum(result.points for result in results), len(POINTS) * len(results)
    return "\n".join(
        [
            *(["figures:", *figures] if figures else []),
            *(["failures:", *lines] if lines else ["no failures"]),
            f"{points} of {most} points, {100 * points / max(most, 1):.1f} %, {sum(result.seconds for result in results):.0f} s",
        ]
    )


def markdown(faults: Sequence[Fault], results: Sequence[Result] = ()) -> str:
    """The table for docs; points where there are results."""
    earned = {result.id: f"{result.points}/{len(POINTS)}" for result in results}
    rows = [f"| {entry.id} | {entry.title} | {earned.get(entry.id, '')} |" for entry in faults]
    return "\n".join(["| | fault | points |", "| --- | --- | --- |", *rows]) + "\n"


def to_json(results: Sequence[Result]) -> str:
    """Results for another program."""
    return json.dumps([asdict(result) | {"points": result.points, "failures": result.failures()} for result in results], indent=1)


def from_json(text: str) -> list[Result]:
    """Results that `to_json` wrote."""
    names = Result.__dataclass_fields__
    return [Result(**{name: value for name, value in entry.items() if name in names}) for entry in json.loads(text)]
