"""tensorboard, wandb and trackio, through accelerate's trackers; off by default, and never a reason for a run to die."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder

logger = logging.getLogger(__name__)

PROJECT = "rloo"
"""Project that runs appear under in wandb (unless WANDB_PROJECT says otherwise) and trackio."""

MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""Modules of which one has to be installed for each tracker."""


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise RecipeError with the install command if the package of a tracker is missing; nothing is imported."""
    missing = [name for name in report_to if not any(find_spec(module) for module in MODULES[name])]
    if missing:
        raise RecipeError(
            f"run.report_to: {', '.join(missing)} not installed. `pip install {' '.join(missing)}`, or take it out of report_to."
        )


class Trackers:
    """The trackers of a run, on the main process only. One that fails on the way is dropped with a warning.

    Args:
        report_to: names of trackers, the recipe's `report_to`.
        folder: run folder; keeps the run's id, so that a resumed run goes on in the same wandb run.
        run_name: name of the run in the trackers.
        recipe: the recipe as resolved, shown as the run's configuration.
        start_step: step that the run goes on from; later points of an abandoned attempt are dropped.

    Raises:
        RefusedError: a tracker could not be started.
    """

    def __init__(
        self, report_to: Sequence[str], *, folder: RunFolder, run_name: str, recipe: Mapping[str, Any], start_step: int = 0
    ) -> None:
        self._trackers: dict[str, Any] = {}
        for name in report_to:
            self._trackers[name] = _start(name, folder, run_name, recipe, start_step)

    def log(self, row: Mapping[str, float | int]) -> None:
        """Report a row of metrics at its `step`."""
        values = {key: value for key, value in row.items() if key != "step"}
        for name in list(self._trackers):
            tracker = self._trackers[name]
            try:
                # wandb drops rows of steps that it has seen: there the step is a value (see _start_wandb) and not a position.
                if name == "wandb":
                    tracker.log({"step": row["step"], **values})
                else:
                    tracker.log(values, step=int(row["step"]))
            except _failures(name) as error:
                logger.warning("%s failed (%s); the run goes on without it", name, error)
                del self._trackers[name]

    def close(self) -> None:
        """Let every tracker send what it still holds."""
        for name, tracker in self._trackers.items():
            try:
                tracker.finish()
            except _failures(name) as error:
                logger.warning("%s could not be closed (%s)", name, error)
        self._trackers = {}


def _start(name: str, folder: RunFolder, run_name: str, recipe: Mapping[str, Any], start_step: int) -> Any:
    try:
        if name == "tensorboard":
            return _start_tensorboard(folder, recipe, start_step)
        if name == "wandb":
            return _start_wandb(folder, run_name, recipe)
        return _start_trackio(run_name, recipe)
    except _failures(name) as error:
        raise RefusedError(f"run.report_to: {name} could not be started: {error}. Put it right, or take it out of report_to.") from error


def _start_tensorboard(folder: RunFolder, recipe: Mapping[str, Any], start_step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("", logging_dir=folder.tensorboard, purge_step=start_step + 1)
    tracker.start()
    tracker.log({"recipe": "    " + json.dumps(recipe, indent=2).replace("\n", "\n    ")}, step=start_step)
    return tracker


def _start_wandb(folder: RunFolder, run_name: str, recipe: Mapping[str, Any]) -> Any:
    from accelerate.tracking import WandBTracker

    run_id = _run_id(folder, "wandb")
    tracker = WandBTracker(PROJECT, name=run_name, id=run_id, resume="allow", dir=str(folder.path))
    tracker.start()
    tracker.store_init_configuration(dict(recipe))
    tracker.tracker.define_metric("*", step_metric="step")
    return tracker


def _start_trackio(run_name: str, recipe: Mapping[str, Any]) -> Any:
    from accelerate.tracking import TrackioTracker

    tracker = TrackioTracker(PROJECT, name=run_name, resume="allow", config=dict(recipe))
    tracker.start()
    return tracker


def _run_id(folder: RunFolder, name: str) -> str:
    """The id of this run in a tracker, made once and kept in the run folder."""
    ids = json.loads(folder.trackers.read_text()) if folder.trackers.exists() else {}
    if name not in ids:
        ids[name] = uuid.uuid4().hex[:8]
        atomic.write_json(folder.trackers, ids)
    return ids[name]


def _failures(name: str) -> tuple[type[Exception], ...]:
    """The exceptions that a tracker raises when it cannot reach its server, is not logged in, or finds no room."""
    common: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)
    if name == "wandb" and find_spec("wandb"):
        import wandb

        return (*common, wandb.Error)
    return common
