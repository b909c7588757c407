"""What `rloo plan --engine` and `--measure` begin with: training's own inputs in this very process, with a folder that is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import EngineError, NonFiniteError, StoppedError
from rloo_cli.launch.local import terminal, training_inputs
from rloo_cli.plan.prepare import Prepared
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import logging_to
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from rloo_cli.training.inputs import TrainingInputs


@contextlib.contextmanager
def trial(prepared: Prepared, *, what: str, trust_remote_code: bool) -> Iterator[TrainingInputs]:
    """Training's inputs for a look at it, called `what`; nothing of it stays. Of all messages only our warnings reach standard error.

    Raises:
        StoppedError: by a signal.
        RlooError: as the block does; where the engine or a number of ours failed, the error names what is kept to look at.
    """
    from rloo_cli.run.progress import Progress

    # Below runs/, not in a temporary folder: weights pass through it where the recipe says `file`, and a server elsewhere reads them.
    folder = RunFolder(Path("runs") / f".{what}-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging(what))
        stack.enter_context(_removed(folder.path))
        try:
            stop = stack.enter_context(StopSignal())
            stack.enter_context(stop.at_once())
            progress = stack.enter_context(Progress(prepared.total_steps, console=terminal(quiet=True)))
            yield training_inputs(prepared, folder, None, progress, stop, trust_remote_code=trust_remote_code)
        except StopRequested as stopped:
            raise StoppedError(f"stopped by {stopped.signal_name}: nothing is kept; run it again.") from stopped


@contextlib.contextmanager
def _logging(what: str) -> Iterator[None]:
    """Sends what libraries say to a file for the block, which is kept and named where the engine fails."""
    descriptor, name = tempfile.mkstemp(prefix=f"rloo-{what}-", suffix=".log")
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


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Removes the folder after the block, and the one above where it was made for it; a batch that failed stays, as its error says."""
    is_kept, is_first = False, not folder.parent.exists()
    try:
        yield
    except NonFiniteError:
        is_kept = RunFolder(folder).failed.exists()
        raise
    finally:
        if not is_kept and folder.exists():
            atomic.remove_tree(folder)
        if is_first:
            atomic.remove_if_empty(folder.parent)
