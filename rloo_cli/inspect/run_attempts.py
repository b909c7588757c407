"""The starts of a run as its logs tell them: when, how long, and how each rank ended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rloo_cli.errors import StoppedError
from rloo_cli.run.folder import ATTEMPT_NAME, RunFolder

TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (?:[A-Z]+) ", re.MULTILINE)
WARNING = re.compile(r"^\S+ \S+ (?:WARNING|ERROR) (?P<logger>rloo_cli\S*|py\.warnings): (?P<message>.*)$", re.MULTILINE)
TAIL = 1 << 16
"""Bytes at the end of a log in which its last time is looked for."""
MOST_LOG = 1 << 24
"""Bytes of a log that are searched for warnings."""
STOPPED = StoppedError.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended, as it said itself, or its launcher where it could not."""

    rank: int
    exit_code: int
    reason: str
    is_neighbour: bool
    """Whether it only ended because another did."""
    is_silent: bool = False
    """Whether it died without a word, and its launcher tells of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run."""

    number: int
    started: datetime | None
    ended: datetime | None
    """Of the last line of its log."""
    ranks: tuple[RankEnd, ...]
    """Those that left a report that can be read."""

    @property
    def cause(self) -> RankEnd | None:
        """The rank whose end was the attempt's: one that died, else that failed of itself, else the first; None where none left a word."""
        failed = [rank for rank in self.ranks if rank.exit_code]
        own = [rank for rank in failed if not rank.is_neighbour]
        told = [rank for rank in own if rank.exit_code != STOPPED]
        silent = [rank for rank in failed if rank.is_silent]
        return next(iter([*silent, *told, *own, *failed, *self.ranks]), None)

    @property
    def seconds(self) -> float | None:
        """From its first line to its last."""
        return (self.ended - self.started).total_seconds() if self.started is not None and self.ended is not None else None


def read_attempts(folder: RunFolder) -> list[Attempt]:
    """The attempts of a run in order, as far as they can be read; whatever is damaged is left out."""
    try:
        numbers = sorted(int(match[1]) for entry in folder.logs.iterdir() if (match := ATTEMPT_NAME.fullmatch(entry.name)))
    except OSError:
        return []
    return [_attempt(folder.attempt(number), number) for number in numbers]


def read_warnings(attempt: Path) -> list[str]:
    """What was warned of in an attempt, each message once, in order."""
    text = _text(attempt / "train.log", 0, MOST_LOG)
    return list(dict.fromkeys(match["message"] for match in WARNING.finditer(text)))


def _attempt(path: Path, number: int) -> Attempt:
    log = path / "train.log"
    first, last = TIME.search(_text(log, 0, 4096)), list(TIME.finditer(_text(log, -TAIL, TAIL)))
    return Attempt(
        number=number,
        started=_time(first),
        ended=_time(last[-1]) if last else None,
        ranks=tuple(sorted(_ranks(path), key=lambda rank: rank.rank)),
    )


def _ranks(path: Path) -> Sequence[RankEnd]:
    try:
        files = [entry for entry in path.iterdir() if re.fullmatch(r"rank-\d+\.json", entry.name)]
    except OSError:
        return []
    return [rank for rank in map(_rank, files) if rank is not None]


def _rank(path: Path) -> RankEnd | None:
    try:
        document = json.loads(path.read_bytes())
        return RankEnd(
            rank=int(document["rank"]),
            exit_code=int(document["exit_code"]),
            reason=str(document.get("reason", "")),
            is_neighbour=bool(document.get("neighbour", False)),
            is_silent=bool(document.get("silent", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _time(match: re.Match[str] | None) -> datetime | None:
    try:
        return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone() if match is not None else None
    except (ValueError, OverflowError):
        return None


def _text(path: Path, start: int, size: int) -> str:
    """`size` bytes of a regular file from `start`, from its end where that is negative; empty where there is none to read."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(0, length + start if start < 0 else start))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
