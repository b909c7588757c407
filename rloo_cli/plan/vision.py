"""What a vision-language model, and prompts with images, cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.schema import Recipe

if TYPE_CHECKING:
    from rloo_cli.data.prompt_source import PromptSource


def check_vision(recipe: Recipe, strategy: str) -> None:
    """Refuse a vision-language model where its weights would lie in parts, or beside an adapter.

    Raises:
        RecipeError: the field and the remedy.
    """
    name = recipe.model.model_name_or_path
    if strategy != "ddp":
        raise RecipeError(
            f"run.accelerate_config: {strategy} is not for vision-language models such as {name} in this version: batches with and without "
            "images would have its processes wait for each other. Use `accelerate_config: ddp`."
        )
    if recipe.model.use_peft:
        raise RecipeError(
            f"model.use_peft: adapters are not for vision-language models such as {name} in this version; all weights are trained without it."
        )


def check_engine_of_images(recipe: Recipe, prompts: PromptSource) -> None:
    """Refuse images beside vLLM.

    Raises:
        RecipeError: the field and the remedy.
    """
    if any(part.head.has_images for part in prompts.parts()) and recipe.generation.use_vllm:
        raise RecipeError(
            f"generation.use_vllm: {prompts.source} has images, with which vLLM is not used in this version; `use_vllm: false` generates with "
            "transformers."
        )
