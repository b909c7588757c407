"""A generation batch with its rewards, and what becomes known of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rloo_cli.algorithm.advantages import combine_rewards
from rloo_cli.errors import RewardError
from rloo_cli.types import LARGEST_REWARD, FinishReason, Group, GroupRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A generation batch of P groups, and what has been computed about its rows.

    The last three fields are NaN where not yet known; they are filled by the first optimizer step that the batch serves.
    """

    step: int
    """The optimizer step it was generated for, from 1."""
    groups: tuple[Group, ...]
    rewards: tuple[GroupRewards, ...]
    reward_PG: torch.Tensor
    """Weighted sum before clip and KL, float64; 0 where unscored."""
    is_scored_PG: torch.Tensor
    is_truncated_PG: torch.Tensor
    sampler_logp_PG: torch.Tensor
    """Σ_t log-prob as the engine reported it, float64, nats."""
    kl_PG: torch.Tensor
    """Σ_t (log π − log π_ref) at the sampling policy, float64, nats."""
    old_logp_PG: torch.Tensor
    """Σ_t log π at the sampling policy, by the trainer, float64, nats."""
    advantage_PG: torch.Tensor
    """What the loss uses, float64."""

    @property
    def num_generations(self) -> int:
        """G."""
        return self.reward_PG.shape[1]


NAN_FIELDS = ("kl_PG", "old_logp_PG", "advantage_PG")
"""The tensors of an experience that the first optimizer step fills."""
ROW_FIELDS = ("reward_PG", "is_scored_PG", "is_truncated_PG", "sampler_logp_PG", *NAN_FIELDS)
"""All of its tensors, a value for each row."""


def build_experience(step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards], weights: Sequence[float]) -> Experience:
    """The experience of scored groups, nothing known yet about their log-probs under the trainer.

    Raises:
        RewardError: a reward is so large that sums over it would not be finite.
    """
    reward_PG, is_scored_PG = weighted_rewards(rewards, weights)
    _refuse_huge(reward_PG, groups)
    unknown_PG = torch.full_like(reward_PG, float("nan"))
    return Experience(
        step=step,
        groups=tuple(groups),
        rewards=tuple(rewards),
        reward_PG=reward_PG,
        is_scored_PG=is_scored_PG,
        is_truncated_PG=torch.tensor([[c.finish_reason is FinishReason.TRUNCATED for c in g.completions] for g in groups]),
        sampler_logp_PG=torch.tensor([[sum(c.logprobs) for c in g.completions] for g in groups], dtype=torch.float64),
        kl_PG=unknown_PG,
        old_logp_PG=unknown_PG,
        advantage_PG=unknown_PG,
    )


def weighted_rewards(rewards: Sequence[GroupRewards], weights: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted sum before clip and KL, float64, 0 where unscored; whether a row is scored), both [P, G]."""
    values_FPG = torch.tensor([[[_number(v) for v in row] for row in scores.values] for scores in rewards], dtype=torch.float64).transpose(
        0, 1
    )
    return combine_rewards(values_FPG, ~values_FPG.isnan(), torch.tensor(weights, dtype=torch.float64))


def empty_experience(step: int, num_generations: int) -> Experience:
    """The experience of a batch of which no group is left."""
    value_PG, flag_PG = torch.zeros(0, num_generations, dtype=torch.float64), torch.zeros(0, num_generations, dtype=torch.bool)
    return Experience(
        step=step,
        groups=(),
        rewards=(),
        reward_PG=value_PG,
        is_scored_PG=flag_PG,
        is_truncated_PG=flag_PG,
        sampler_logp_PG=value_PG,
        kl_PG=value_PG,
        old_logp_PG=value_PG,
        advantage_PG=value_PG,
    )


def select_groups(experience: Experience, indices: Sequence[int]) -> Experience:
    """The experience of some of its groups, in the order of `indices`; of none of them too."""
    chosen = torch.tensor(indices, dtype=torch.long)
    return replace(
        experience,
        groups=tuple(experience.groups[p] for p in indices),
        rewards=tuple(experience.rewards[p] for p in indices),
        **{name: getattr(experience, name)[chosen] for name in ROW_FIELDS},
    )


def put_back(part: Experience, whole: Experience, indices: Sequence[int]) -> Experience:
    """`whole` with what has become known of its groups `indices`, which `part` holds."""
    known = {}
    for name in NAN_FIELDS:
        known[name] = getattr(whole, name).clone()
        known[name][torch.tensor(indices, dtype=torch.long)] = getattr(part, name)
    return replace(whole, **known)


def _refuse_huge(reward_PG: torch.Tensor, groups: Sequence[Group]) -> None:
    huge_PG = ~(reward_PG.abs() <= LARGEST_REWARD)
    if huge_PG.any():
        p, g = huge_PG.nonzero()[0].tolist()
        raise RewardError(
            f"the weighted reward of prompt row {groups[p].prompt.row}, completion {g} is {reward_PG[p, g].item():g}; "
            f"beyond {LARGEST_REWARD:g} nothing can be computed from it: scale the reward or its weight down."
        )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
