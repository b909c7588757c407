"""How the ranks of an attempt ended, and the one error that stands for it: the first that was not a neighbour's."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli import errors
from rloo_cli.errors import LostRankError, NeighbourError, RlooError, StoppedError
from rloo_cli.launch.record import log_name
from rloo_cli.run.logs import RankReport

SHOWN_CHARACTERS = 120
"""Of a log's last line."""
LOG_PREFIX = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: ")
"""What `run.logs.LOG_FORMAT` puts before a message."""
TAIL_BYTES = 8192
BUG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one rank's process ended."""

    rank: int
    returncode: int
    """As subprocess has it: negative for a signal."""
    was_killed: bool
    """By the launcher, since others had ended."""
    report: RankReport | None
    """What it left; None = it died without a word."""
    host: str = field(default_factory=socket.gethostname)

    @property
    def exit_code(self) -> int:
        """What its report says, since a signal may still come when all is done; else the process' own."""
        return self.returncode if self.report is None else self.report.exit_code

    @property
    def has_failed(self) -> bool:
        """Whether it did not come to its end."""
        return bool(self.exit_code) or self.was_killed

    @property
    def is_neighbour(self) -> bool:
        """Whether it ended because another did."""
        return self.was_killed or (self.report is not None and self.report.neighbour)


def error_of(endings: Sequence[Ending], attempt: Path) -> RlooError | None:
    """What the command fails with, or None where every rank trained to the end.

    Args:
        endings: in the order in which the ranks ended.
        attempt: the log folder.
    """
    failed = [ending for ending in endings if ending.has_failed]
    own = [ending for ending in failed if not ending.is_neighbour]
    silent = [ending for ending in own if ending.report is None]
    stopped = [ending for ending in own if ending.exit_code == StoppedError.exit_code]
    told = [ending for ending in own if ending not in silent and ending not in stopped]
    for ending in [*silent, *told, *sorted(stopped, key=lambda ending: ending.rank)]:
        return _own_error(ending, attempt)
    for ending in failed:
        said = f": {ending.report.reason}" if ending.report is not None else ""
        return LostRankError(
            f"the processes of the run lost each other; rank {ending.rank} first{said} (log: {attempt / log_name(ending.rank)})."
        )
    return None


def _own_error(ending: Ending, attempt: Path) -> RlooError:
    log, report = attempt / log_name(ending.rank), ending.report
    where = f"rank {ending.rank} on {ending.host}"
    if report is None:
        last = last_line(log)
        said = f", after: {last}" if last else ""
        return LostRankError(f"{where} {death(ending.returncode)} without a word{said} (log: {log}).")
    kind = next((kind for kind in _kinds() if kind.exit_code == report.exit_code), None)
    if kind is None or report.exit_code == BUG:
        return LostRankError(f"{where}: {report.reason} (traceback in {log}). This is a fault in rloo: please report it.")
    return kind(report.message or report.reason)


def _kinds() -> Iterator[type[RlooError]]:
    values = vars(errors).values()
    return (v for v in values if isinstance(v, type) and issubclass(v, RlooError) and v not in (RlooError, NeighbourError, LostRankError))


def death(returncode: int) -> str:
    """`was ended by SIGKILL` or `ended with exit code 3`."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def last_line(log: Path) -> str:
    """The last message of a log, cut to a line's length; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    line = LOG_PREFIX.sub("", next((line.strip() for line in reversed(lines) if line.strip()), ""), count=1)
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"
