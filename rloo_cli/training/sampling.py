"""How completions are sampled, in training and in evaluation."""

from __future__ import annotations

from rloo_cli.recipe.schema import Recipe
from rloo_cli.rollout.engine import SamplingParams


def training_params(recipe: Recipe) -> SamplingParams:
    """How completions are sampled in training."""
    generation = recipe.generation
    return SamplingParams(
        max_new_tokens=generation.max_completion_length,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        stop=tuple(generation.stop),
        regex=generation.vllm_structured_outputs_regex,
    )


def eval_params(recipe: Recipe) -> SamplingParams:
    """How completions are sampled in evaluation."""
    return SamplingParams(
        max_new_tokens=recipe.generation.max_completion_length,
        temperature=recipe.evaluation.eval_temperature,
        stop=tuple(recipe.generation.stop),
        regex=recipe.generation.vllm_structured_outputs_regex,
    )
