"""`rloo plan --engine` in this very process: the recipe's engine against the trainer. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import StoppedError
from rloo_cli.launch.local import terminal, training_inputs
from rloo_cli.plan.prepare import Prepared
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from rloo_cli.training.engine_check import EngineCheck


def check_engine_here(prepared: Prepared, *, trust_remote_code: bool) -> EngineCheck:
    """What the engine's log-probs are against the trainer's.

    Raises:
        RlooError: as the first step of training would.
    """
    from rloo_cli.run.progress import Progress
    from rloo_cli.training.engine_check import check_engine

    folder = RunFolder(Path("runs") / f".engine-check-{os.getpid()}")  # weights pass through it where the recipe says `file`
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, folder.path)
        try:
            stop = stack.enter_context(StopSignal())
            stack.enter_context(stop.at_once())
            progress = stack.enter_context(Progress(prepared.total_steps, console=terminal(quiet=True)))
            return check_engine(training_inputs(prepared, folder, None, progress, stop, trust_remote_code=trust_remote_code))
        except StopRequested as stopped:
            raise StoppedError(f"stopped by {stopped.signal_name}: nothing is kept of a check; run it again.") from stopped


def _remove(path: Path) -> None:
    if path.exists():
        atomic.remove_tree(path)
