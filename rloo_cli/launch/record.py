"""What an attempt leaves in its log folder, however it ends: the traceback in the rank's log and its exit code."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rloo_cli.errors import NeighbourError, RlooError, StorageError
from rloo_cli.run.logs import RankReport, write_rank_report

logger = logging.getLogger(__name__)

LOG_NOTE = "traceback in "
"""How an exception says where its traceback was written (a note of PEP 678)."""
INTERRUPTED = 130
SHOWN_CHARACTERS = 160
"""Of what torch says when another rank is gone."""
COMMUNICATION = "/torch/distributed/"
"""Where in torch an exception comes from that another rank's end caused."""


def log_name(rank: int) -> str:
    """The log file of a rank: `train.log` of the main one, `train-rank-1.log`."""
    return f"train-rank-{rank}.log" if rank else "train.log"


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
            error.add_note(f"{LOG_NOTE}{self._attempt / log_name(self._rank)}")
        else:
            logger.info("done")
        report = RankReport(
            rank=self._rank,
            exit_code=exit_code_of(error),
            reason=_reason(error),
            neighbour=isinstance(error, NeighbourError),
            message=error.message if isinstance(error, RlooError) else "",
        )
        with contextlib.suppress(*([StorageError] if error is not None else [])):  # what ended the block is the better news
            write_rank_report(self._attempt, report)


@contextlib.contextmanager
def lost_neighbours_told() -> Iterator[None]:
    """Makes a NeighbourError of what torch says where another rank is gone, for the block: that rank knows the reason."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_communication(error):
            raise
        line = (str(error).splitlines() or [""])[0][:SHOWN_CHARACTERS]
        raise NeighbourError(f"another process of the run is gone ({type(error).__name__}: {line})") from error


def _is_of_communication(error: RuntimeError) -> bool:
    """Whether it is an error of torch.distributed's own, or was raised in there: gloo raises plain ones."""
    distributed = sys.modules.get("torch.distributed")
    is_own = distributed is not None and isinstance(error, distributed.DistError)
    return is_own or any(COMMUNICATION in frame.filename for frame in traceback.extract_tb(error.__traceback__))


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
