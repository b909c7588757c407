"""Where messages go: everything to the attempt's train.log, warnings of ours to the terminal; and how each rank ended."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_cli.errors import StorageError
from rloo_cli.recipe.secrets import masked, secret_values
from rloo_cli.run import atomic

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFile(logging.Handler):
    """Appends records, with tracebacks, to a file; on a full disk the records are counted and dropped, training decides."""

    def __init__(self, path: Path, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._path = path
        self._secrets = secrets
        self.dropped = 0
        self.setFormatter(logging.Formatter(LOG_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        text = masked(self.format(record), self._secrets)
        try:
            atomic.append_line(self._path, text.encode("utf-8", "backslashreplace").decode())
        except StorageError:
            self.dropped += 1


class Terminal(logging.Handler):
    """Shows warnings and errors of ours as one line each, without a traceback."""

    def __init__(self, show: Callable[[str], None], secrets: tuple[str, ...] = ()) -> None:
        super().__init__(logging.WARNING)
        self._show = show
        self._secrets = secrets
        self.addFilter(logging.Filter("rloo_cli"))

    def emit(self, record: logging.LogRecord) -> None:
        """Show the first line of one record; the file has the rest."""
        self._show(f"{record.levelname.lower()}: {masked((record.getMessage().splitlines() or [''])[0], self._secrets)}")


@contextmanager
def logging_to(path: Path, *, show: Callable[[str], None] | None = None, environment: Mapping[str, str] | None = None) -> Iterator[LogFile]:
    """Send the root logger to the file `path`, and our warnings to `show`, for the block.

    `environment` is searched for secrets, whose values are masked in both. Python's warnings go to the file too.
    """
    root = logging.getLogger()
    secrets = secret_values(environment or {})
    log_file = LogFile(path, secrets)
    handlers: list[logging.Handler] = [log_file, *([Terminal(show, secrets)] if show else [])]
    level = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield log_file
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)


def quiet_libraries() -> None:
    """Keep third-party messages and bars off the terminal (they still reach the log). To be called after those libraries are imported."""
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it brings its own handler, and is imported later by transformers
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()
        transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules:
        import datasets

        datasets.disable_progress_bars()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """How one rank of an attempt ended."""

    rank: int
    exit_code: int
    reason: str
    """One line; empty when all went well."""
    neighbour: bool = False
    """Whether it only ended because another rank did."""
    message: str = ""
    """Of an error of ours, all of its lines."""
    silent: bool = False
    """Whether it died without a word, and the launcher tells of it; `exit_code` is then subprocess', negative for a signal."""


def write_rank_report(attempt: Path, report: RankReport) -> None:
    """Leave `rank-K.json` in the attempt's folder."""
    secrets = secret_values(os.environ)
    said = {"reason": masked(report.reason, secrets), "message": masked(report.message, secrets)}
    atomic.write_json(attempt / f"rank-{report.rank}.json", asdict(report) | said)


def read_rank_reports(attempt: Path) -> list[RankReport]:
    """The reports of all ranks that left one, or whose launcher did, by rank."""
    reports = [RankReport(**json.loads(path.read_text())) for path in attempt.glob("rank-*.json")]
    return sorted(reports, key=lambda report: report.rank)
