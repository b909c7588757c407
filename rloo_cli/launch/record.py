"""What an attempt leaves in its log folder, however it ends: the traceback in train.log and the rank's exit code."""

from __future__ import annotations

import contextlib
import logging
import traceback
from pathlib import Path
from types import TracebackType

from rloo_cli.errors import RlooError, StorageError
from rloo_cli.run.logs import RankReport, write_rank_report

logger = logging.getLogger(__name__)

LOG_NOTE = "traceback in "
"""How an exception says where its traceback was written (a note of PEP 678)."""
INTERRUPTED = 130


class AttemptRecord:
    """Writes `rank-K.json` at the end of its block, and the traceback of what ended it to the log.

    The exception goes on its way, with a note that names the log.
    """

    def __init__(self, attempt: Path, *, rank: int = 0) -> None:
        self._attempt = attempt
        self._rank = rank

    def __enter__(self) -> AttemptRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            logger.info("%s\n%s", _reason(error), "".join(traceback.format_exception(error)).rstrip())
            error.add_note(f"{LOG_NOTE}{self._attempt / 'train.log'}")
        else:
            logger.info("done")
        report = RankReport(rank=self._rank, exit_code=exit_code_of(error), reason=_reason(error))
        with contextlib.suppress(*([StorageError] if error is not None else [])):  # what ended the block is the better news
            write_rank_report(self._attempt, report)


def exit_code_of(error: BaseException | None) -> int:
    """The exit code that stands for how a block ended."""
    if error is None:
        return 0
    if isinstance(error, RlooError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    text = error.message if isinstance(error, RlooError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__
