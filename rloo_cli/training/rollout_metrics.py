"""Metrics of a generation batch: rewards, lengths, groups. Values that do not exist are absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rloo_cli.algorithm.advantages import has_signal
from rloo_cli.training.experience import Experience
from rloo_cli.types import FinishReason

ENDED_BY_ITSELF = (FinishReason.STOPPED, FinishReason.STOP_STRING)


def rollout_metrics(experience: Experience, names: Sequence[str]) -> dict[str, float]:
    """Everything that is known once completions have their rewards, by documented name.

    Args:
        experience: the generation batch.
        names: the reward functions' names, in the order of `GroupRewards.values`.
    """
    scored_PG = experience.is_scored_PG
    result = {
        "groups/no_signal": float((~has_signal(scored_PG)).sum()),
        "rows/unscored": float((~scored_PG).sum()),
        "rewards/failures": float(sum(len(scores.failures) for scores in experience.rewards)),
        "sampling/staleness": float(experience.step - 1 - min(c.weights_version for g in experience.groups for c in g.completions)),
    }
    if scored_PG.any():
        result["reward"] = experience.reward_PG[scored_PG].mean().item()
    spreads = _group_spreads(experience)
    if spreads:
        result["reward_std"] = sum(spreads) / len(spreads)
        result["groups/zero_std"] = sum(spread == 0 for spread in spreads) / len(experience.groups)
    for k, name in enumerate(names):
        result |= _reward_metrics(experience, k, name)
    return result | _logged_metrics(experience) | _length_metrics(experience)


def kl_metrics(experience: Experience) -> dict[str, float]:
    """`kl` by completion token and by sequence, over the rows whose KL is known."""
    known_PG = ~experience.kl_PG.isnan()
    if not known_PG.any():
        return {}
    tokens_PG = torch.tensor([[len(c.token_ids) for c in g.completions] for g in experience.groups])
    total = experience.kl_PG[known_PG].sum().item()
    return {"kl": total / tokens_PG[known_PG].sum().item(), "kl/sequence": total / known_PG.sum().item()}


def generated_tokens(experience: Experience) -> tuple[int, int]:
    """(prompt tokens, completion tokens) of the batch; a prompt counts once for each completion, as it is usually counted."""
    prompt = sum(len(g.prompt.token_ids) * len(g.completions) for g in experience.groups)
    return prompt, sum(len(c.token_ids) for g in experience.groups for c in g.completions)


def _group_spreads(experience: Experience) -> list[float]:
    """The standard deviation (n − 1) of each group with signal; exactly 0 where max equals min."""
    spreads = []
    for reward_G, scored_G in zip(experience.reward_PG, experience.is_scored_PG, strict=True):
        values = reward_G[scored_G]
        if len(values) >= 2:
            spreads.append(0.0 if values.max() == values.min() else values.std().item())
    return spreads


def _reward_metrics(experience: Experience, k: int, name: str) -> dict[str, float]:
    column = [value for scores in experience.rewards for value in scores.values[k]]
    values = torch.tensor([value for value in column if value is not None], dtype=torch.float64)
    result = {}
    if len(values):
        result[f"rewards/{name}/mean"] = values.mean().item()
    if len(values) > 1:
        result[f"rewards/{name}/std"] = values.std().item()
    if len(values) < len(column):
        result[f"rewards/{name}/unscored"] = 1 - len(values) / len(column)
    return result


def _logged_metrics(experience: Experience) -> dict[str, float]:
    """The mean over groups of each value that a reward function logged."""
    logged: dict[str, list[float]] = {}
    for scores in experience.rewards:
        for name, value in scores.metrics.items():
            logged.setdefault(name, []).append(value)
    return {f"custom/{name}": sum(values) / len(values) for name, values in logged.items()}


def _length_metrics(experience: Experience) -> dict[str, float]:
    completions = [c for group in experience.groups for c in group.completions]
    lengths = [len(c.token_ids) for c in completions]
    terminated = [len(c.token_ids) for c in completions if c.finish_reason in ENDED_BY_ITSELF]
    result = _lengths("completions/{}_length", lengths)
    result["completions/clipped_ratio"] = sum(c.finish_reason is FinishReason.TRUNCATED for c in completions) / len(completions)
    return result | (_lengths("completions/{}_terminated_length", terminated) if terminated else {})


def _lengths(pattern: str, lengths: list[int]) -> dict[str, float]:
    return {pattern.format("mean"): sum(lengths) / len(lengths), pattern.format("min"): min(lengths), pattern.format("max"): max(lengths)}
