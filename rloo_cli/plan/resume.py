"""The recipe of a resumed run: the run's own, with the changes that leave its numbers alone."""

from __future__ import annotations

from typing import Any

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.schema import Recipe

SAFE_FIELDS = {
    "run.output_dir",
    "run.run_name",
    "run.logging_steps",
    "run.report_to",
    "run.save_strategy",
    "run.save_steps",
    "run.save_total_limit",
    "run.reward_workers",
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


def recipe_for_resume(new: Recipe, old: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe to go on with, and a line for each difference that is taken over.

    Args:
        new: as the command line and the recipe file now say.
        old: the run's own resolved recipe.

    Raises:
        RefusedError: a difference would change the run's numbers; each is listed.
    """
    was, now = _flat(old), _flat(new)
    taken, refused = {}, []
    for field in now:
        if now[field] == was.get(field) or (field in DECIDED_FIELDS and now[field] == DECIDED_FIELDS[field]):
            continue
        if _is_safe(field, new):
            taken[field] = now[field]
        else:
            refused.append(f"  {field}: {was.get(field)!r} in the run, {now[field]!r} now{_why(field, new)}")
    refused += [f"  {field}: {was[field]!r} in the run, gone now" for field in was if field not in now]
    if refused:
        raise RefusedError(
            "\n".join(
                [
                    "the recipe differs from the run's in fields that change its numbers:",
                    *refused,
                    "Give the same --set options as the run had (its environment.json has the command), or start a new run.",
                ]
            )
        )
    return _with_values(old, taken), [f"{field}: {now[field]!r} from here on (was {was.get(field)!r})" for field in taken]


def _is_safe(field: str, new: Recipe) -> bool:
    if field in LENGTH_FIELDS:
        return new.training.lr_scheduler_type in FLAT_SCHEDULES and (new.training.warmup_steps >= 1 or not new.training.warmup_steps)
    if field.startswith("rewards["):
        return field.rpartition(".")[2] in SAFE_REWARD_FIELDS
    return field in SAFE_FIELDS or field.startswith("evaluation.")


def _why(field: str, new: Recipe) -> str:
    if field not in LENGTH_FIELDS:
        return ""
    return f" (another length changes every learning rate of the {new.training.lr_scheduler_type} schedule)"


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Every leaf by its path, rewards by index."""
    flat: dict[str, Any] = {}
    for section, values in recipe.model_dump().items():
        entries = [(f"{section}[{i}]", entry) for i, entry in enumerate(values)] if section == "rewards" else [(section, values)]
        for prefix, entry in entries:
            flat |= {f"{prefix}.{name}": value for name, value in entry.items()}
    return flat


def _with_values(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    document = recipe.model_dump()
    for field, value in values.items():
        section, _, name = field.rpartition(".")
        target = document["rewards"][int(section[8:-1])] if section.startswith("rewards[") else document[section]
        target[name] = value
    return Recipe.model_validate(document)
