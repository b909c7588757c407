"""What DeepSpeed is told, by keys of `accelerate config` or a JSON file of its own: the stage is read, and what is not offered is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_keys import JSON_IDLE, StrategyName, idle_told
from rloo_cli.recipe.deepspeed_json import read_json, refuse_wrong_counts
from rloo_cli.recipe.distribution import Distribution, Precision
from rloo_cli.recipe.nodes import printable


def of_deepspeed(values: Mapping[str, Any], where: Callable[[str], str]) -> Distribution:
    """From keys as `accelerate config` writes them."""
    for key in ("offload_optimizer_device", "offload_param_device"):
        if str(values.get(key) or "none").lower() != "none":
            raise RecipeError(f"{where(key)}: {_NO_OFFLOADING}.")
    return Distribution(strategy=_stage(values.get("zero_stage", 2), where("zero_stage")))


_NO_OFFLOADING = (
    "DeepSpeed's offloading is not offered; fsdp2's is: `distributed_type: FSDP`, with `fsdp_version: 2` and `fsdp_offload_params: true` "
    "in `fsdp_config`"
)
_OFFLOADING = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")
"""Keys of DeepSpeed's `zero_optimization`; the last two are older names."""


def _without_offloading(zero: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What is said beside that nothing is offloaded; DeepSpeed would keep the gradient where only its own optimizers find it."""
    for key in _OFFLOADING:
        said = zero.get(key)
        if said and not (isinstance(said, dict) and str(said.get("device") or "none").lower() == "none"):
            raise RecipeError(f"{path}: zero_optimization.{key}: {_NO_OFFLOADING}.")
    return {key: value for key, value in zero.items() if key not in _OFFLOADING}


def _stage(stage: object, where: str) -> StrategyName:
    if stage == 2 and not isinstance(stage, bool):
        return "zero2"
    if stage == 3:
        return "zero3"
    why = "stage 2 needs less memory at the same speed" if stage == 1 else "stages 2 and 3 are offered, and `ddp` for whole copies"
    raise RecipeError(f"{where}: stage {printable(str(stage), 40)} is not offered: {why}.")


def of_deepspeed_file(path: Path) -> Distribution:
    """From a JSON file of DeepSpeed's own.

    Raises:
        RecipeError: it cannot be read, or asks for what is not offered.
    """
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("zero_optimization"), dict):
        raise RecipeError(f"{path}: zero_optimization: missing; it says the stage, 2 or 3.")
    unknown = sorted(document.keys() - {"zero_optimization", "bf16", "fp16"} - JSON_IDLE.keys())
    if unknown:
        why = (
            "the recipe says it (optim, learning_rate, lr_scheduler_type)" if unknown[0] in ("optimizer", "scheduler") else "not known here"
        )
        raise RecipeError(f"{path}: {printable(unknown[0])}: {why}; remove it.")
    if _is_enabled(document.get("fp16")):
        raise RecipeError(f"{path}: fp16: not offered; bf16 is, by `bf16: true` in the recipe.")
    section = {key: _whole(value) for key, value in document["zero_optimization"].items() if key != "stage" and value != "auto"}
    refuse_wrong_counts(section, path)
    strategy = _stage(document["zero_optimization"].get("stage"), f"{path}: zero_optimization.stage")
    return Distribution(
        strategy=strategy,
        zero=_without_offloading(section, path),
        mixed_precision=_precision_of_json(document.get("bf16")),
        notes=idle_told(path, document, JSON_IDLE),
    )


def _is_enabled(section: object) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def _precision_of_json(section: object) -> Precision | None:
    if not isinstance(section, dict) or not isinstance(section.get("enabled"), bool):
        return None
    return "bf16" if section["enabled"] else "no"


def _whole(value: Any) -> Any:
    """DeepSpeed counts in whole numbers, which its files write as 5e8."""
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items() if entry != "auto"}
    return int(value) if isinstance(value, float) and value.is_integer() else value
