"""The recipe of a resumed run: the run's own, with the changes that leave its numbers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_cli import __version__
from rloo_cli.errors import RefusedError
from rloo_cli.recipe.flat import flat_values, with_values
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.checkpoint import Checkpoint

SAFE_FIELDS = {
    "run.output_dir",
    "run.run_name",
    "run.logging_steps",
    "run.report_to",
    "run.save_strategy",
    "run.save_steps",
    "run.save_total_limit",
    "run.metric_for_best_model",
    "run.greater_is_better",
    "run.num_processes",
    "run.accelerate_config",
    "run.reward_workers",
    "run.reward_memory_gb",
    "run.push_to_hub",
    "run.hub_model_id",
    "run.hub_private_repo",
    "run.hub_revision",
    "generation.vllm_gpu_memory_utilization",
    "generation.vllm_enable_sleep_mode",
    "generation.vllm_server_base_url",
    "generation.vllm_server_host",
    "generation.vllm_server_port",
    "generation.vllm_server_key_file",
    "generation.vllm_server_timeout",
    "generation.vllm_server_retry_seconds",
    "generation.vllm_weight_transfer",
    "generation.vllm_weight_transfer_dir",
    "generation.vllm_group_port",
}
"""Fields that change no number of training; all of `evaluation` is safe as well, and a reward's timeout."""
ROUNDING_FIELDS = {"run.num_processes", "run.accelerate_config"}
"""Fields that change the order of sums alone."""
SAFE_REWARD_FIELDS = {"timeout", "env"}
DECIDED_FIELDS = {
    "training.bf16": True,
    "training.threads": "auto",
    "training.layout": "auto",
    "training.head_chunk": "auto",
    "training.max_tokens_per_micro_batch": "auto",
}
"""Fields that the first start may have decided, with the value that asked for it: what was decided stays."""
LENGTH_FIELDS = {"training.max_steps", "training.num_train_epochs"}
FLAT_SCHEDULES = {"constant", "constant_with_warmup"}


def recipe_for_resume(new: Recipe, old: Recipe, *, run: Path) -> tuple[Recipe, list[str]]:
    """The recipe to go on with, and a line for each difference: what is taken over, and what the run has decided and keeps.

    Args:
        new: as the command line and the recipe file now say.
        old: the run's own resolved recipe.
        run: its folder, for the message.

    Raises:
        RefusedError: a difference would change the run's numbers; each is listed.
    """
    taken, changes, refused = _differences(new, old)
    if refused:
        raise RefusedError(
            "\n".join(
                [
                    f"the recipe differs from that of {run} in fields that change its numbers:",
                    *refused,
                    "Give the same --set options as the run had (its environment.json has the command), or start a new run.",
                ]
            )
        )
    return with_values(old, taken), [*changes, *_kept(new, old)]


def _kept(new: Recipe, old: Recipe) -> list[str]:
    """A line for each field that was asked for by name, and of which the run has decided otherwise."""
    was, now = flat_values(old), flat_values(new)
    return [
        f"{field}: stays {was[field]!r}, as the run decided at its start ({now[field]!r} asks for a decision, and another one would change "
        "its numbers)"
        for field in DECIDED_FIELDS
        if field.partition(".")[2] in new.training.model_fields_set and now[field] == DECIDED_FIELDS[field] != was[field]
    ]


def _differences(new: Recipe, old: Recipe) -> tuple[dict[str, Any], list[str], list[str]]:
    """(harmless fields that differ, with their new values; a line for each; a line for each other field that differs)."""
    was, now = flat_values(old), flat_values(new)
    taken: dict[str, Any] = {}
    refused = []
    for field in now:
        if now[field] == was.get(field) or (field in DECIDED_FIELDS and now[field] == DECIDED_FIELDS[field]):
            continue
        if _is_safe(field, new):
            taken[field] = now[field]
        else:
            refused.append(f"  {field}: {was.get(field)!r} in the run, {now[field]!r} now{_why(field, new)}")
    refused += [f"  {field}: {was[field]!r} in the run, gone now" for field in was if field not in now]
    return taken, [f"{field}: {now[field]!r} from here on (was {was.get(field)!r}){_rounds(field)}" for field in taken], refused


def is_at_its_end(new: Recipe, old: Recipe, *, run: Path, finished_step: int, total_steps: int) -> bool:
    """Whether a run that finished has nothing left to do under the recipe as it is now.

    Args:
        new: as the command line and the recipe file now say.
        old: the run's own.
        run: its folder, for the message.
        finished_step: the step of its final model.
        total_steps: of which it was the end, or is to be since it was asked for more.

    Raises:
        RefusedError: the recipes differ in what changes the run's numbers.
    """
    merged, _ = recipe_for_resume(new, old, run=run)
    if merged.training.max_steps > 0:
        return finished_step >= merged.training.max_steps
    is_longer = any(flat_values(new)[field] != flat_values(old)[field] for field in LENGTH_FIELDS)
    return not is_longer and finished_step >= total_steps


def refuse_foreign(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Raise RefusedError where a checkpoint is that of another recipe, or of a version of rloo whose numbers may be others."""
    maker = str(checkpoint.info.get("rloo", __version__))
    if _release(maker) != _release(__version__):
        raise RefusedError(
            f"checkpoint {checkpoint.path} was written by rloo {maker}, and this is {__version__}, which may compute other numbers: "
            f"install rloo {maker} to go on, or start a new run."
        )
    if checkpoint.has("recipe"):
        _, _, refused = _differences(recipe, _recipe_of(checkpoint))
        if refused:
            raise RefusedError(
                "\n".join([f"checkpoint {checkpoint.path} is another recipe's:", *refused, "Resume the run that it belongs to."])
            )


def _recipe_of(checkpoint: Checkpoint) -> Recipe:
    try:
        return Recipe.model_validate_json(json.dumps(checkpoint.load_document("recipe")))
    except ValidationError as error:
        raise RefusedError(f"checkpoint {checkpoint.path} comes from another version of rloo: this one cannot read its recipe.") from error


def _release(version: str) -> list[str]:
    """`0.3.1` → what must be the same for a resume: 0.3; a last number alone changes nothing that is computed."""
    return version.split(".")[:2]


def _is_safe(field: str, new: Recipe) -> bool:
    if field in LENGTH_FIELDS:
        return new.training.lr_scheduler_type in FLAT_SCHEDULES and (new.training.warmup_steps >= 1 or not new.training.warmup_steps)
    if field.startswith("rewards["):
        return field.rpartition(".")[2] in SAFE_REWARD_FIELDS
    return field in SAFE_FIELDS or field.startswith("evaluation.")


def _rounds(field: str) -> str:
    return "; sums are taken in another order, so that numbers differ by rounding, in bf16 visibly" if field in ROUNDING_FIELDS else ""


def _why(field: str, new: Recipe) -> str:
    if field not in LENGTH_FIELDS:
        return ""
    return f" (another length changes every learning rate of the {new.training.lr_scheduler_type} schedule)"
