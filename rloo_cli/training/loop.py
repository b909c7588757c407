"""The training loop, as prose."""

from __future__ import annotations

from typing import Protocol

from rloo_cli.errors import EngineError, NeighbourError, StoppedError
from rloo_cli.run.signals import StopRequested


class Run(Protocol):
    """What the loop drives. `TrainingRun` is the real one."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""

    def next_batch(self) -> None:
        """Have a generation batch with rewards at hand: the one in use, or next prompts → generate → score."""

    def update(self) -> None:
        """Advantages, loss, gradient, optimizer."""

    def sync_weights(self) -> None:
        """Hand the new weights to the engine."""

    def record(self) -> None:
        """Metrics, rollouts, progress."""

    def evaluate_if_due(self) -> None:
        """Evaluate where the recipe asks for it after this step, once."""

    def save_if_due(self) -> None:
        """Save a checkpoint where the recipe asks for one after this step, once."""

    def save(self) -> None:
        """Save the state after the last optimizer step, unless it is saved."""

    def save_final(self) -> None:
        """Write final/."""


def run_loop(run: Run) -> None:
    """Train to the end.

    Raises:
        StoppedError: a signal came. The step in progress was discarded, the state after the last one is saved.
        EngineError: engine or server failed; the state after the last step is saved.
    """
    try:
        run.evaluate_if_due()
        while not run.finished:
            run.next_batch()
            run.update()
            run.sync_weights()
            run.record()
            run.evaluate_if_due()
            run.save_if_due()
    except StopRequested as stop:
        run.save()
        done = f"step {run.step} is saved, --resume goes on from there" if run.step else "no step was done, --resume starts again"
        raise StoppedError(f"stopped by {stop.signal_name}: {done}.") from stop
    except EngineError as error:  # the trainer's own state is sound: a server that is gone costs no step
        run.save()
        if not run.step:
            raise
        raise EngineError(f"{error.message.rstrip('.')}. Step {run.step} is saved; --resume goes on from there.") from error
    except NeighbourError as error:
        if error.kind == EngineError.__name__:  # the rank whose engine failed saves too, and all save together
            run.save()
        raise
    run.save_final()
