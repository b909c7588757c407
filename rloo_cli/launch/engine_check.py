"""`rloo plan --engine` in this very process: the recipe's engine against the trainer. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import EngineError, StoppedError
from rloo_cli.launch.local import terminal, training_inputs
from rloo_cli.plan.prepare import Prepared
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import logging_to
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from rloo_cli.training.engine_check import EngineCheck


def check_engine_here(prepared: Prepared, *, trust_remote_code: bool) -> EngineCheck:
    """What the engine's log-probs are against the trainer's. Of all messages only our warnings reach standard error.

    Raises:
        RlooError: as the first step of training would.
    """
    from rloo_cli.run.progress import Progress
    from rloo_cli.training.engine_check import check_engine

    folder = RunFolder(Path("runs") / f".engine-check-{os.getpid()}")  # weights pass through it where the recipe says `file`
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging())
        stack.callback(_remove, folder.path)
        try:
            stop = stack.enter_context(StopSignal())
            stack.enter_context(stop.at_once())
            progress = stack.enter_context(Progress(prepared.total_steps, console=terminal(quiet=True)))
            return check_engine(training_inputs(prepared, folder, None, progress, stop, trust_remote_code=trust_remote_code))
        except StopRequested as stopped:
            raise StoppedError(f"stopped by {stopped.signal_name}: nothing is kept of a check; run it again.") from stopped


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Sends what libraries say to a file for the block, which is kept and named where the engine fails."""
    descriptor, name = tempfile.mkstemp(prefix="rloo-engine-check-", suffix=".log")
    os.close(descriptor)
    log, is_kept = Path(name), False
    try:
        with logging_to(log, show=_warn, environment=os.environ):
            yield
    except EngineError as error:
        is_kept = True
        raise EngineError(f"{error.message.rstrip('.')} (log: {log}).") from error
    finally:
        if not is_kept:
            log.unlink(missing_ok=True)


def _warn(message: str) -> None:
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    sys.stderr.write(f"{shown}\n")


def _remove(path: Path) -> None:
    if path.exists():
        atomic.remove_tree(path)
