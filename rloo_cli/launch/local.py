"""Training and evaluation in this very process: reward workers first, then data, then the run folder, then the model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import RefusedError
from rloo_cli.launch.record import AttemptRecord
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe, Prepared, errors_placed, prepare, reward_runner
from rloo_cli.plan.resume import recipe_for_resume
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import Checkpoint, find_checkpoint
from rloo_cli.run.environment import describe_environment
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import logging_to

if TYPE_CHECKING:
    from rich.console import Console

    from rloo_cli.recipe.schema import Recipe


def train_here(checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool) -> None:
    """Train to the end in `target.folder`.

    Raises:
        RlooError: each kind with its exit code; the traceback is in the attempt's log.
    """
    folder = target.folder
    log_dir = folder.attempt(folder.attempts() + 1)
    with contextlib.closing(reward_runner(checked, log_dir=log_dir)) as rewards, errors_placed(checked.loaded):
        prepared = prepare(checked, rewards, trust_remote_code=trust_remote_code)
        with folder.lock():
            folder.prepare()
            attempt = folder.new_attempt()
            _train_locked(prepared, target, attempt, trust_remote_code=trust_remote_code, quiet=quiet)


def _train_locked(prepared: Prepared, target: Target, attempt: Path, *, trust_remote_code: bool, quiet: bool) -> None:
    from rloo_cli.run.progress import Progress
    from rloo_cli.training.inputs import TrainingInputs
    from rloo_cli.training.train import train

    folder, loaded = target.folder, prepared.checked.loaded
    console = terminal(quiet=quiet)
    with logging_to(attempt / "train.log", show=_show_on(console), environment=os.environ), AttemptRecord(attempt):
        checkpoint, prepared = _resumed(prepared, target, console)
        atomic.write_file(folder.recipe_source, loaded.source_text)
        atomic.write_json(folder.environment, _environment(prepared))
        recipe = prepared.recipe
        start = checkpoint.step if checkpoint is not None else 0
        with Progress(prepared.total_steps, start_step=start, logging_steps=recipe.run.logging_steps, console=console) as progress:
            train(
                TrainingInputs(
                    recipe=recipe,
                    batch=loaded.batch,
                    total_steps=prepared.total_steps,
                    tokenizer=prepared.tokenizer,
                    prompts=prepared.prompts,
                    eval_prompts=prepared.eval_prompts,
                    rewards=prepared.rewards,
                    folder=folder,
                    resume_from=checkpoint,
                    trust_remote_code=trust_remote_code,
                    progress=progress,
                )
            )


def _resumed(prepared: Prepared, target: Target, console: Console) -> tuple[Checkpoint | None, Prepared]:
    """The checkpoint to go on from, and what was prepared with the run's own recipe in it.

    Raises:
        RefusedError: the recipe has changed in what matters, or the run is at its end.
        StorageError: the run's recipe or every checkpoint is damaged.
    """
    folder = target.folder
    if target.resume is None:
        return None, prepared
    if folder.recipe.is_file():
        recipe, changes = recipe_for_resume(prepared.recipe, _recipe_of(folder))
        prepared = replace(prepared, recipe=recipe)
        for change in changes:
            console.print(f"note: {change}", markup=False)
    finished = folder.finished_step()
    if finished is not None and finished >= prepared.total_steps:
        raise RefusedError(f"{folder.path} holds a finished run (step {finished}): there is nothing to go on with.")
    checkpoint = find_checkpoint(folder.checkpoints, target.resume)
    where = f"from the checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint was saved, so from step 0"
    console.print(f"resuming {folder.path}: {where}", markup=False)
    return checkpoint, prepared


def _recipe_of(folder: RunFolder) -> Recipe:
    return load_recipe(folder.recipe).recipe


def _environment(prepared: Prepared) -> Mapping[str, object]:
    checked = prepared.checked
    document = describe_environment(command=sys.argv, recipe_folder=checked.loaded.path.parent, now=datetime.now().astimezone())
    return {
        **document,
        "recipe": str(checked.loaded.path.resolve()),
        "code_dir": str(checked.code_dir.resolve()),
        "data_fingerprint": prepared.prompts.fingerprint,
    }


def terminal(*, quiet: bool) -> Console:
    """Where progress goes: standard output, or nowhere."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, quiet=quiet)


def _show_on(console: Console) -> Callable[[str], None]:
    return lambda message: console.print(message, markup=False)
