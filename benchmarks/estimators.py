"""RLOO and its neighbours: functions from a batch's rewards to advantages.

Each takes `reward_PG` and `is_scored_PG` (every row is, here) and gives `advantage_PG`, as the product's own function does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rloo_cli.algorithm.advantages import STD_EPSILON, leave_one_out_advantages

Advantages = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

rloo: Advantages = leave_one_out_advantages


def no_baseline(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """REINFORCE: A = R (Williams 1992)."""
    return reward_PG


def no_baseline_lower(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """REINFORCE where every reward is 1 less: A = R − 1. The same objective, up to a constant."""
    return reward_PG - 1


def group_mean(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """A = R − mean R, the row itself included in the mean."""
    return reward_PG - reward_PG.mean(dim=1, keepdim=True)


def standardised(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """GRPO: (R − mean) / (std + 1e-4) in each group (Shao et al. 2024, arXiv 2402.03300)."""
    return group_mean(reward_PG, is_scored_PG) / (reward_PG.std(dim=1, keepdim=True) + STD_EPSILON)


def best_of_group(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """RAFT: imitate one best completion of each group, whatever its reward (Dong et al. 2023, arXiv 2304.06767).

    A is G for the first best row and 0 for the others: the mean over rows is then the mean over the imitated ones.
    """
    advantage_PG = torch.zeros_like(reward_PG)
    return advantage_PG.scatter(1, reward_PG.argmax(dim=1, keepdim=True), float(reward_PG.shape[1]))
