"""How many groups of a step teach something, by how often a prompt is solved."""

from __future__ import annotations

from typing import Any

from rloo_cli.recipe.batch import BatchPlan
from rloo_cli.recipe.schema import Recipe

PASS_RATES = (0.01, 0.1, 0.5)
FEW = 0.1
"""Share of groups with signal below which most of the sampling is for nothing."""


def share_with_signal(pass_rate: float, num_generations: int) -> float:
    """Probability that G completions of a prompt, each right with probability p, are neither all right nor all wrong: 1 − p^G − (1−p)^G."""
    return 1 - pass_rate**num_generations - (1 - pass_rate) ** num_generations


def generations_for(share: float, pass_rate: float) -> int:
    """The least G whose share of groups with signal is at least `share`, which is below 1; 0 < pass_rate < 1."""
    count = 2
    while share_with_signal(pass_rate, count) < share:
        count += 1
    return count


def signal_document(recipe: Recipe, batch: BatchPlan) -> dict[str, Any]:
    """The expected share of groups with signal at each of PASS_RATES, under a reward of two values; with G that would be enough where it is few."""
    group = batch.num_generations
    rates = []
    for rate in PASS_RATES:
        share = share_with_signal(rate, group)
        enough = generations_for(FEW, rate) if share < FEW else None
        rates.append({"pass_rate": rate, "share": share, "groups": share * batch.prompts_per_step, "generations_for_a_tenth": enough})
    return {"num_generations": group, "prompts_per_step": batch.prompts_per_step, "rates": rates, "mode": recipe.algorithm.dynamic_sampling}
