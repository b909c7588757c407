"""What the attempts of a SLURM job leave in its folder: each task's exit code, and how often the job was requeued for nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_cli.errors import EngineError, LostRankError, NeighbourError, StoppedError
from rloo_cli.run import atomic

FATES = (0, NeighbourError.exit_code, StoppedError.exit_code, LostRankError.exit_code)
"""Exit codes that tell of no failure of the run's own making."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """How the task of one node ended."""

    node: int
    """From 0, within its step; the run's rank 0 is on node 0."""
    host: str
    exit_code: int
    time: float
    """Seconds since 1970."""


def write_record(folder: Path, record: TaskRecord) -> None:
    """Leave `exit-N.json` in the attempt's folder."""
    atomic.make_folder(folder)
    atomic.write_json(folder / f"exit-{record.node}.json", asdict(record))


def read_records(folder: Path) -> list[TaskRecord]:
    """Those of an attempt that are there, in the order in which the tasks ended."""
    found = []
    for path in folder.glob("exit-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(TaskRecord(**json.loads(path.read_bytes())))
    return sorted(found, key=lambda record: record.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an attempt comes to."""

    exit_code: int
    reason: str
    """A few words for the job's output."""
    goes_on: bool = False
    """Whether another attempt would go on where this one ended."""


def judge(records: Sequence[TaskRecord], *, tasks: int, server_code: int | None, has_bug: bool, is_unwanted: bool) -> Verdict:
    """The verdict on an attempt whose training has ended.

    Args:
        records: of the training's tasks, in the order in which they ended.
        tasks: how many there were.
        server_code: of the server's step where that ended by itself after it had been ready.
        has_bug: whether a process of the run ended with an error that is none of ours; its exit code is that of a lost one, too.
        is_unwanted: whether whoever stopped the job wants it to stay stopped.
    """
    codes = [record.exit_code for record in records]
    own = next((record for record in records if record.exit_code not in FATES), None)
    if codes == [0] * tasks:
        return Verdict(exit_code=0, reason="the training is done")
    if server_code is not None and (own is None or own.exit_code == EngineError.exit_code):
        reason = f"the server ended by itself with {server_code}"
        return Verdict(exit_code=EngineError.exit_code, reason=reason, goes_on=not is_unwanted)
    if own is not None:
        return Verdict(exit_code=own.exit_code, reason=f"rloo ended with {own.exit_code} on {own.host}")
    if has_bug:
        return Verdict(exit_code=LostRankError.exit_code, reason="a fault in rloo")
    if StoppedError.exit_code in codes:
        return Verdict(exit_code=StoppedError.exit_code, reason="the training was stopped", goes_on=not is_unwanted)
    silent = sorted(set(range(tasks)) - {record.node for record in records})
    said = f"nothing was heard of the end on node {silent[0]} of {tasks}" if silent else "a process or a machine was lost"
    return Verdict(exit_code=LostRankError.exit_code, reason=said, goes_on=not is_unwanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run had come when an attempt began."""

    step: int
    """Of the newest checkpoint; -1 = none."""
    fruitless: int
    """Attempts in a row, up to this one, that began where the one before them had."""


def next_progress(file: Path, *, step: int) -> Progress:
    """The progress at the start of an attempt, compared with that of the attempt before it, and kept in `file` for the next."""
    before = _read_progress(file)
    fruitless = 0 if before is None or step > before.step else before.fruitless + 1
    progress = Progress(step=step, fruitless=fruitless)
    atomic.write_json(file, asdict(progress))
    return progress


def _read_progress(file: Path) -> Progress | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Progress(**json.loads(file.read_bytes()))
    return None
