"""Evaluation in this very process, of a recipe's model or of what a run has trained. Writes nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import RecipeError, RefusedError, StoppedError, StorageError
from rloo_cli.launch.given import place_of
from rloo_cli.launch.local import recorded, terminal, training_inputs
from rloo_cli.plan.prepare import CheckedRecipe, check_recipe, errors_placed, prepare, reward_runner
from rloo_cli.run.checkpoint import Checkpoint, find_checkpoint
from rloo_cli.run.folder import RunFolder, open_existing
from rloo_cli.run.signals import StopRequested, StopSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated."""

    checked: CheckedRecipe
    folder: RunFolder
    checkpoint: Checkpoint | None
    words: str
    """`the final model of runs/x`."""


def choose_subject(name: str, *, overrides: list[str], code_dir: str | None, checkpoint: str | None) -> Subject:
    """What `rloo eval NAME` means: a run folder (its final model, else its latest checkpoint), or a recipe's model as it is.

    Raises:
        RecipeError, RefusedError, StorageError: there is no such thing, or nothing to evaluate it on.
    """
    path = Path(name)
    if not (path / "recipe.yaml").is_file():
        if checkpoint is not None:
            raise RefusedError(f"--checkpoint needs a run folder, and {name} is none (it has no recipe.yaml).")
        if path.is_dir():
            raise RefusedError(f"{name} is no run folder (it has no recipe.yaml): give a recipe's file, or a run folder.")
        checked = check_recipe(name, overrides=overrides, code_dir=code_dir)
        subject = Subject(checked=checked, folder=RunFolder(path), checkpoint=None, words=checked.loaded.recipe.model.model_name_or_path)
    else:
        subject = _run_subject(open_existing(path), overrides, code_dir, checkpoint)
    if not subject.checked.loaded.recipe.data.has_test_split:
        raise RecipeError("data.dataset_test_split: evaluation needs a split to evaluate on; none is named. Add it by --set.")
    return subject


def _run_subject(folder: RunFolder, overrides: list[str], code_dir: str | None, checkpoint: str | None) -> Subject:
    code_dir = code_dir or _code_dir_of(folder)
    if checkpoint is None and (damage := folder.final_damage()) is not None:
        raise StorageError(
            f"the final model of {folder.path} is damaged ({damage}): evaluate a checkpoint by `--checkpoint latest`, or have it written "
            "anew by `rloo train … --resume`."
        )
    if checkpoint is None and folder.finished_step() is not None:
        overrides = [*overrides, f"model.model_name_or_path={json.dumps(str(folder.final.resolve()))}", "model.random_weights=false"]
        checked = check_recipe(folder.recipe, overrides=overrides, code_dir=code_dir)
        return Subject(checked=checked, folder=folder, checkpoint=None, words=f"the final model of {folder.path}")
    if checkpoint is not None and not checkpoint.isdecimal() and checkpoint != "latest":
        raise RefusedError(f"--checkpoint {checkpoint}: a step number is wanted, or `latest`.")
    found = find_checkpoint(folder.checkpoints, int(checkpoint) if checkpoint and checkpoint.isdecimal() else "latest")
    if found is None:
        raise RefusedError(f"{folder.path} holds neither a final model nor a checkpoint yet.")
    checked = check_recipe(folder.recipe, overrides=overrides, code_dir=code_dir)
    return Subject(checked=checked, folder=folder, checkpoint=found, words=f"step {found.step} of {folder.path}")


def _code_dir_of(folder: RunFolder) -> str | None:
    """Where the run's reward functions were imported from, as its environment.json says."""
    code_dir = recorded(folder, "code_dir")
    return code_dir if isinstance(code_dir, str) and Path(code_dir).is_dir() else None


def evaluate_here(subject: Subject, *, trust_remote_code: bool, quiet: bool) -> dict[str, float]:
    """The `eval/…` metrics.

    Raises:
        RlooError: each kind with its exit code.
    """
    place_of(os.environ)  # torch reads it too, and does not say what is wrong with it
    try:
        with StopSignal() as stop, stop.at_once():
            return _evaluate(subject, stop, trust_remote_code=trust_remote_code, quiet=quiet)
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped.signal_name}: nothing is kept of an evaluation; run it again.") from stopped


def _evaluate(subject: Subject, stop: StopSignal, *, trust_remote_code: bool, quiet: bool) -> dict[str, float]:
    checked = subject.checked
    with reward_runner(checked, log_dir=None) as rewards, errors_placed(checked.loaded):
        prepared = prepare(checked, rewards, trust_remote_code=trust_remote_code, evaluates=True)
        from rloo_cli.run.progress import Progress
        from rloo_cli.training.train import evaluate_model

        with Progress(0, console=terminal(quiet=quiet)) as progress:
            inputs = training_inputs(prepared, subject.folder, subject.checkpoint, progress, stop, trust_remote_code=trust_remote_code)
            _, metrics = evaluate_model(inputs)
    return metrics
