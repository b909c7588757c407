"""Estimators against the exact policy gradient, on a problem small enough to enumerate.

    python benchmarks/exactness.py            # a second; docs/algorithm.md shows its tables

Vocabulary of 3, completions of 2 tokens, a softmax policy with 12 logits (drawn from N(0, 1), as the 9 rewards are). The exact gradient of the
expected reward is a sum over the 9 completions. What an estimator gives for a group is averaged over all 9^G groups, each weighted by
its probability, in float64: nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from estimators import Advantages, best_of_group, group_mean, no_baseline, rloo, standardised

COMPLETIONS = list(itertools.product(range(3), repeat=2))
GROUPS = (2, 4)
SHIFTS = (0.0, 2.0)
ESTIMATORS: dict[str, Advantages] = {
    "RLOO": rloo,
    "no baseline (REINFORCE)": no_baseline,
    "mean of the whole group": group_mean,
    "mean and std of the group (GRPO)": standardised,
    "best of the group (RAFT)": best_of_group,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What an estimator gives, over all groups.

    `mean_D` is its expectation; `variance` the trace of its covariance for one completion's worth of budget: G times that of a group, so
    that numbers of different G compare at an equal count of completions.
    """

    mean_D: torch.Tensor
    variance: float


def log_probs(theta_D: torch.Tensor) -> torch.Tensor:
    """log π of each completion, [9]: the first token from 3 logits, the second from a row of 3 for each first token."""
    first = theta_D[:3].log_softmax(0)
    second = theta_D[3:].view(3, 3).log_softmax(1)
    return torch.stack([first[a] + second[a, b] for a, b in COMPLETIONS])


def problem(shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities [9], gradient of each completion's log-prob [9, D], rewards [9]); `shift` is added to every reward."""
    theta_D = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reward = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(log_probs, theta_D)
    return log_probs(theta_D).exp(), jacobian, reward + shift


def exact_gradient(shift: float = 0.0) -> torch.Tensor:
    """∇ E[R] = Σ π R ∇ log π, [D]."""
    probability, jacobian, reward = problem(shift)
    return (probability * reward) @ jacobian


def moments(advantages: Advantages, group_size: int, shift: float = 0.0) -> Moments:
    """Of (1/G) Σ A_i ∇ log π(y_i) over all groups of `group_size` completions."""
    probability, jacobian, reward = problem(shift)
    groups_PG = torch.tensor(list(itertools.product(range(9), repeat=group_size)))
    weight_P = probability[groups_PG].prod(dim=1)
    reward_PG = reward[groups_PG]
    advantage_PG = advantages(reward_PG, torch.ones_like(reward_PG, dtype=torch.bool))
    estimate_PD = torch.einsum("pg,pgd->pd", advantage_PG, jacobian[groups_PG]) / group_size
    mean_D = weight_P @ estimate_PD
    return Moments(mean_D=mean_D, variance=group_size * float(weight_P @ (estimate_PD - mean_D).square().sum(dim=1)))


def rows(shift: float) -> list[Sequence[str]]:
    """A line for each estimator and group size: name, G, size and direction of its mean, bias, variance."""
    exact_D = exact_gradient(shift)
    lines = []
    for name, advantages in ESTIMATORS.items():
        for group_size in GROUPS:
            found = moments(advantages, group_size, shift)
            size = float(found.mean_D.norm() / exact_D.norm())
            cosine = float(torch.nn.functional.cosine_similarity(found.mean_D, exact_D, dim=0))
            bias = float((found.mean_D - exact_D).norm() / exact_D.norm())
            shown_bias = "0 (< 1e-12)" if bias < 1e-12 else f"{bias:.3f}"
            variance = found.variance / float(exact_D.square().sum())
            lines.append((name, str(group_size), f"{size:.3f}", f"{cosine:.4f}", shown_bias, f"{variance:.1f}"))
    return lines


HEADER = ("advantages", "G", "length of the mean", "cosine", "bias", "variance per completion")


def tables() -> dict[str, list[Sequence[str]]]:
    """Title → rows under HEADER."""
    return {f"Rewards with {shift:g} added to each" if shift else "Rewards as they are": rows(shift) for shift in SHIFTS}


if __name__ == "__main__":
    for title, lines in tables().items():
        print(f"\n{title} (all but G and cosine relative to the exact gradient)\n")
        for line in [HEADER, *lines]:
            print(f"{line[0]:34}" + "".join(f"{cell:>26}" if i == 5 else f"{cell:>20}" for i, cell in enumerate(line[1:], 1)))
