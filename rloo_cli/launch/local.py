"""Training and evaluation in this very process: reward workers first, then data, then the run folder, then the model."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli import __version__
from rloo_cli.errors import RefusedError, StoppedError
from rloo_cli.launch import report
from rloo_cli.launch.first_start import attempt_undone, folder_undone
from rloo_cli.launch.job import Job
from rloo_cli.launch.joining import join_others, keep_layout_ours
from rloo_cli.launch.origin import final_written_anew, refuse_other_batch, refuse_other_data, refuse_other_run, refuse_past_the_end, run_of
from rloo_cli.launch.record import AttemptRecord, log_name, lost_neighbours_told
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe, Prepared, errors_placed, prepare, reward_runner
from rloo_cli.plan.resume import is_at_its_end, recipe_for_resume, refuse_foreign
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.secrets import masked_command, secret_values
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import Checkpoint, find_checkpoint, list_steps
from rloo_cli.run.environment import describe_environment
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import logging_to
from rloo_cli.run.ranks import ALONE, Ranks
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import Recipe
    from rloo_cli.run.progress import LastingConsole, Progress
    from rloo_cli.training.inputs import TrainingInputs

logger = logging.getLogger(__name__)


def train_here(
    checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool, leave: Callable[[], None] | None = None
) -> None:
    """Train to the end in `target.folder`, which is locked meanwhile; `leave` is StopSignal's.

    Raises:
        RlooError: each kind with its exit code; the traceback is in the attempt's log.
    """
    with held(target) as (attempt, notes), StopSignal(leave=leave) as stop:
        train_rank(new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet), stop)


def new_job(checked: CheckedRecipe, target: Target, attempt: Path, notes: tuple[str, ...], *, trust_remote_code: bool, quiet: bool) -> Job:
    """What this command line asks of its main rank."""
    return Job(
        checked=checked,
        folder=target.folder,
        resume=target.resume,
        attempt=attempt,
        command=kept_command(),
        trust_remote_code=trust_remote_code,
        quiet=quiet,
        notes=notes,
    )


@contextlib.contextmanager
def held(target: Target) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """(the log folder of a new attempt, what there is to tell) of a run folder that is locked for the block.

    What a new run's start wrote is taken away again where the block finds the recipe, its data or its model wrong before the first step.
    """
    with folder_undone(target), target.folder.lock() as dead, attempt_undone(target) as attempt:
        notes = [f"note: took over the lock of pid {dead.pid} on {dead.host}, which no longer runs"] if dead is not None else []
        yield attempt, tuple(notes)


def train_rank(job: Job, stop: StopSignal) -> None:
    """Train to the end as one of the job's ranks, the only one or not.

    Raises:
        RlooError: each kind with its exit code; the traceback is in the rank's log, and `rank-K.json` tells how it ended.
    """
    console, attempt = terminal(quiet=job.quiet), job.attempt
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_to(attempt / log_name(job.rank), show=console.say, environment=os.environ))
        logger.info("rloo %s: %s", __version__, shlex.join(job.command))
        stack.enter_context(AttemptRecord(attempt, rank=job.rank))
        if job.world_size > 1:
            stack.enter_context(lost_neighbours_told())
        for note in job.notes:
            _say(console, note)
        if job.is_main:
            job.folder.remove_orphans()
        stack.enter_context(_stops_before_training_told(job.folder))
        stack.enter_context(errors_placed(job.checked.loaded))
        rewards = stack.enter_context(reward_runner(job.checked, log_dir=attempt / f"rank-{job.rank}" if job.rank else attempt))
        with stop.at_once():
            reading = "importing rewards, reading the data"
            with console.status(reading) if console.is_interactive else contextlib.nullcontext():
                prepared = prepare(job.checked, rewards, trust_remote_code=job.trust_remote_code)
            for notice in prepared.notices:
                _say(console, f"note: {notice}")
            prepared = replace(prepared, recipe=_with_processes(prepared.recipe, job.world_size))
            if job.is_main:
                job.folder.prepare()
            keep_layout_ours(os.environ)
            ranks = join_others(job) if job.world_size > 1 else ALONE
            checkpoint, prepared = _resumed(prepared, job, ranks, console)
        _train(prepared, job, checkpoint, console, stop)
        if job.is_main:
            _say(console, report.write_report(job.folder, is_alone=job.world_size == 1))


def _with_processes(recipe: Recipe, count: int) -> Recipe:
    """The recipe with what `run.num_processes: auto` is here, as the run keeps it."""
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"num_processes": count})})


@contextlib.contextmanager
def _stops_before_training_told(folder: RunFolder) -> Iterator[None]:
    """Makes a StoppedError of a signal that came before the loop, which tells of later ones itself."""
    try:
        yield
    except StopRequested as stop:
        steps = list_steps(folder.checkpoints)
        done = (
            f"the checkpoint of step {steps[-1]} stands, --resume goes on from there"
            if steps
            else "no step was done, --resume starts again"
        )
        raise StoppedError(f"stopped by {stop.signal_name} before training began: {done}.") from stop


def nothing_left(checked: CheckedRecipe, folder: RunFolder) -> bool:
    """Whether the run in a folder, which has a final model, is at its end under the recipe as it is now; a damaged one is no end.

    Raises:
        RefusedError: the recipe has changed in what matters.
    """
    finished = folder.finished_step() if folder.final_damage() is None else None
    if finished is None or not folder.recipe.is_file():
        return finished is not None
    total = recorded(folder, "total_steps")
    return is_at_its_end(
        checked.loaded.recipe,
        _recipe_of(folder),
        run=folder.path,
        finished_step=finished,
        total_steps=total if isinstance(total, int) else finished,
    )


def _train(prepared: Prepared, job: Job, checkpoint: Checkpoint | None, console: LastingConsole, stop: StopSignal) -> None:
    from rloo_cli.run.progress import Progress
    from rloo_cli.training.train import train

    folder, recipe, loaded = job.folder, prepared.recipe, prepared.checked.loaded
    if job.is_main:
        atomic.write_file(folder.recipe_source, loaded.source_text)
        atomic.write_json(folder.environment, _environment(prepared, job))
        if folder.run_id() is None:
            atomic.write_json(folder.identity, {"id": run_of(checkpoint) or uuid.uuid4().hex})
    size = f"{loaded.batch.prompts_per_step} prompts with {loaded.batch.num_generations} completions each"
    logger.info("%s prompts, %d optimizer steps of %s", prepared.prompts.size or "streamed", prepared.total_steps, size)
    start = checkpoint.step if checkpoint is not None else 0
    with (
        Progress(prepared.total_steps, start_step=start, logging_steps=recipe.run.logging_steps, console=console) as progress,
        stop.telling(progress.note) if progress.is_live else contextlib.nullcontext(),
    ):
        train(training_inputs(prepared, folder, checkpoint, progress, stop, trust_remote_code=job.trust_remote_code))


def training_inputs(
    prepared: Prepared, folder: RunFolder, checkpoint: Checkpoint | None, progress: Progress, stop: StopSignal, *, trust_remote_code: bool
) -> TrainingInputs:
    """What training and evaluation are given, from what was prepared."""
    from rloo_cli.training.inputs import TrainingInputs

    return TrainingInputs(
        recipe=prepared.recipe,
        batch=prepared.checked.loaded.batch,
        total_steps=prepared.total_steps,
        tokenizer=prepared.tokenizer,
        processor_files=prepared.processor_files,
        prompts=prepared.prompts,
        eval_prompts=prepared.eval_prompts,
        rewards=prepared.rewards,
        folder=folder,
        resume_from=checkpoint,
        trust_remote_code=trust_remote_code,
        progress=progress,
        distribution=prepared.checked.loaded.distribution,
        stop=stop,
    )


def _resumed(prepared: Prepared, job: Job, ranks: Ranks, console: LastingConsole) -> tuple[Checkpoint | None, Prepared]:
    """The checkpoint to go on from, and what was prepared with the run's own recipe in it; ranks verify the former together.

    Raises:
        RefusedError: recipe or data have changed in what matters, or the run is at its end.
        StorageError: the run's recipe or every checkpoint is damaged.
    """
    folder = job.folder
    if job.resume is None:
        return None, prepared
    prepared, changes = ranks.together(lambda: _as_the_run_began(prepared, folder))
    for change in changes:
        _say(console, f"note: {change}")
    damage = ranks.broadcast(folder.final_damage() if ranks.is_main else None)
    finished = folder.finished_step() if damage is None else None
    if finished is not None and finished >= prepared.total_steps:
        raise RefusedError(f"{folder.path} holds a finished run (step {finished}): there is nothing to go on with.")
    checkpoint = find_checkpoint(folder.checkpoints, job.resume, ranks)
    if checkpoint is not None:
        ranks.together(lambda: _refuse_unfit(checkpoint, prepared, folder))
    elif finished is not None:
        raise RefusedError(f"{folder.path} holds a finished run (step {finished}) and no checkpoint to go on from: start a new run.")
    if damage is not None:
        _say(console, final_written_anew(folder, damage, checkpoint))
    where = f"from the checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint was saved, so from step 0"
    _say(console, f"resuming {folder.path}: {where}")
    return checkpoint, prepared


def _as_the_run_began(prepared: Prepared, folder: RunFolder) -> tuple[Prepared, list[str]]:
    """What was prepared with the run's own recipe in it, and what that takes over; RefusedError where the run began with something else."""
    changes: list[str] = []
    if folder.recipe.is_file():
        recipe, changes = recipe_for_resume(prepared.recipe, _recipe_of(folder), run=folder.path)
        prepared = replace(prepared, recipe=recipe)
    refuse_other_data(prepared, folder, recorded(folder, "data_fingerprint"))
    refuse_other_batch(prepared, folder, recorded(folder, "completions_per_step"))
    return prepared, changes


def _refuse_unfit(checkpoint: Checkpoint, prepared: Prepared, folder: RunFolder) -> None:
    """Raise RefusedError where the run cannot go on from a checkpoint."""
    refuse_other_run(checkpoint, folder)
    refuse_foreign(checkpoint, prepared.recipe)
    refuse_other_data(prepared, folder, checkpoint.origin().get("data"))
    refuse_other_batch(prepared, folder, checkpoint.origin().get("completions_per_step"))
    refuse_past_the_end(prepared, checkpoint)


def recorded(folder: RunFolder, key: str) -> object:
    """What the run's environment.json says under a key; None where it says nothing or cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(folder.environment.read_text(encoding="utf-8"))
        return document.get(key) if isinstance(document, dict) else None
    return None


def _recipe_of(folder: RunFolder) -> Recipe:
    return load_recipe(folder.recipe).recipe


def kept_command() -> tuple[str, ...]:
    """The command line as it may be kept."""
    return tuple(masked_command(sys.argv, secret_values(os.environ)))


def _environment(prepared: Prepared, job: Job) -> Mapping[str, object]:
    checked = prepared.checked
    document = describe_environment(command=job.command, recipe_folder=checked.loaded.path.parent, now=datetime.now().astimezone())
    return {
        **document,
        "recipe": str(checked.loaded.path.resolve()),
        "code_dir": str(checked.code_dir.resolve()),
        "data_fingerprint": prepared.prompts.fingerprint,
        "total_steps": prepared.total_steps,
        "num_processes": job.world_size,
        "num_machines": checked.loaded.num_machines,
        "strategy": checked.loaded.distribution.strategy,
        "completions_per_step": checked.loaded.batch.completions_per_step,
    }


def terminal(*, quiet: bool) -> LastingConsole:
    """Where progress goes: standard output, or nowhere. Lines are drawn anew on a terminal that somebody looks at alone."""
    from rloo_cli.run.progress import LastingConsole

    interactive = None if sys.stdout.isatty() and not os.environ.get("CI") else False  # FORCE_COLOR makes a terminal of a file
    console = LastingConsole(highlight=False, quiet=quiet, force_jupyter=False, force_interactive=interactive)  # plain in a notebook, too
    console.soft_wrap = not console.is_terminal  # a terminal gets lines that break between words, a file the whole line
    return console


@contextlib.contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """A sign of life on standard error while the block runs, on a terminal alone."""
    from rich.console import Console

    with Console(stderr=True).status(for_what):
        yield


def _say(console: LastingConsole, message: str) -> None:
    logger.info(message)
    console.say(message)
