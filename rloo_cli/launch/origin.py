"""What a run began with, and the refusal to go on with anything else."""

from __future__ import annotations

import contextlib

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.plan.prepare import Prepared
from rloo_cli.run.checkpoint import Checkpoint, find_checkpoint
from rloo_cli.run.folder import RunFolder


def refuse_other_data(prepared: Prepared, folder: RunFolder, was: object) -> None:
    """Raise RefusedError where the prompts are not those of the fingerprint that the run began with; None: it did not say."""
    if was is not None and was != prepared.prompts.fingerprint:
        raise RefusedError(
            f"{prepared.prompts.source} has changed since {folder.path} began: the run would go on with other prompts. "
            "Bring the data back, or start a new run."
        )


def refuse_other_batch(prepared: Prepared, folder: RunFolder, was: object) -> None:
    """Raise RefusedError where the number of processes makes a step of another size than the run's are; None: it did not say."""
    loaded = prepared.checked.loaded
    if was is not None and was != loaded.batch.completions_per_step:
        raise RefusedError(
            f"a step of {folder.path} has {was} completions, and on {loaded.num_processes} process(es) it would have "
            f"{loaded.batch.completions_per_step}: give the number of processes that the run had, or say "
            "per_device_train_batch_size or gradient_accumulation_steps anew in a new run."
        )


def refuse_other_run(checkpoint: Checkpoint, folder: RunFolder) -> None:
    """Raise RefusedError where a checkpoint is another run's; early ones do not say whose they are."""
    its, own = run_of(checkpoint), folder.run_id() or _run_of_checkpoints(folder)
    if its is not None and own is not None and its != own:
        raise RefusedError(
            f"checkpoint {checkpoint.path} is of another run ({its[:8]}) than {folder.path} ({own[:8]}), whose metrics and rollouts would "
            "not fit it: resume each run from a checkpoint of its own."
        )


def refuse_past_the_end(prepared: Prepared, checkpoint: Checkpoint) -> None:
    """Raise RefusedError where a checkpoint is of a later step than the last that the recipe now asks for."""
    if checkpoint.step > prepared.total_steps:
        raise RefusedError(
            f"training.max_steps: the run would end at step {prepared.total_steps}, and checkpoint {checkpoint.path} is of step "
            f"{checkpoint.step}: ask for at least as many, or go on from an earlier checkpoint by --resume=STEP."
        )


def final_written_anew(folder: RunFolder, damage: str, checkpoint: Checkpoint | None) -> str:
    """What to tell of a damaged final model.

    Raises:
        StorageError: there is no checkpoint that it could be written from again.
    """
    if checkpoint is None:
        raise StorageError(
            f"the final model of {folder.path} is damaged ({damage}), and there is no checkpoint to write it from again: restore it, or "
            "start a new run."
        )
    return f"warning: the final model is damaged ({damage}): the run goes on from its checkpoint and writes it anew"


def run_of(checkpoint: Checkpoint | None) -> str | None:
    """The id of the run that saved a checkpoint, or None where it does not say."""
    found = checkpoint.origin().get("run") if checkpoint is not None else None
    return found if isinstance(found, str) else None


def _run_of_checkpoints(folder: RunFolder) -> str | None:
    """The run's id as its newest whole checkpoint has it."""
    with contextlib.suppress(StorageError):
        return run_of(find_checkpoint(folder.checkpoints))
    return None
