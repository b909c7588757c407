"""Evaluation: own random streams, greedy by default; it changes no training number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rloo_cli.data.mixture import Mixture
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.recipe.schema import Recipe
from rloo_cli.rollout.engine import RandomKey
from rloo_cli.training.collector import Collector
from rloo_cli.training.experience import Experience, build_experience
from rloo_cli.training.rollout_metrics import rollout_metrics
from rloo_cli.training.sampling import eval_params
from rloo_cli.types import GroupRewards

ROWS_AT_ONCE = 256  # completions decoded together; enough to fill two cores, small enough for any cache
FULL_REWARD = 1.0  # what a verifiable reward gives a right answer
LEFT_OUT = ("groups/", "reward_std", "sampling/")  # spread within a group says nothing about an evaluation, and nothing trains on it


def evaluate(
    collector: Collector, prompts: PromptSet | Mixture, recipe: Recipe, names: Sequence[str], step: int, check_stop: Callable[[], None]
) -> tuple[Experience, dict[str, float]]:
    """All completions of the evaluation split with their rewards, and the `eval/…` metrics of the current weights.

    The streams depend on the seed alone, so the same weights evaluated twice give the same numbers.
    """
    width = recipe.evaluation.num_generations_eval
    params = eval_params(recipe)
    key = RandomKey(seed=recipe.training.seed, step=0, stream="eval")
    groups, scores = [], []
    at_once = max(1, ROWS_AT_ONCE // width)
    for start in range(0, len(prompts), at_once):
        part = [prompts[i] for i in range(start, min(start + at_once, len(prompts)))]
        part_groups, part_scores, _ = collector.collect(
            part, params, key, step=step, num_generations=width, first_prompt=start, check_stop=check_stop
        )
        groups += part_groups
        scores += part_scores
    experience = build_experience(step, groups, scores, [entry.weight for entry in recipe.rewards])
    found = {k: v for k, v in rollout_metrics(experience, names).items() if not k.startswith(LEFT_OUT)}
    found |= {"prompts": float(len(groups))} | _pass_at_k(scores, names, width)
    return experience, {f"eval/{key}": value for key, value in found.items()}


def _pass_at_k(scores: Sequence[GroupRewards], names: Sequence[str], k: int) -> dict[str, float]:
    """For each reward function, the share of prompts of which some completion has the full reward."""
    if k == 1:
        return {}
    return {
        f"rewards/{name}/pass@{k}": _share([any(v is not None and v >= FULL_REWARD for v in group.values[f]) for group in scores])
        for f, name in enumerate(names)
    }


def _share(flags: Sequence[bool]) -> float:
    return torch.tensor(flags, dtype=torch.float64).mean().item()
