"""Leave-one-out advantages.

Source: Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740, equation 6 (the RLOO estimator).
"""

from __future__ import annotations

import torch

STD_EPSILON = 1e-4  # keeps the division finite where all advantages agree; TRL's value


def combine_rewards(values_FPG: torch.Tensor, applies_FPG: torch.Tensor, weights_F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of each row's rewards, and which rows have any.

    R = Σ_k w_k r_k over the functions k that apply to the row.

    Args:
        values_FPG: raw rewards; entries that do not apply may hold anything, NaN too.
        applies_FPG: True where the function gave a number.
        weights_F: a weight for each function.

    Returns:
        `(reward_PG, is_scored_PG)`; an unscored row has reward 0.
    """
    weighted_FPG = torch.where(applies_FPG, values_FPG, torch.zeros_like(values_FPG)) * weights_F[:, None, None]
    return weighted_FPG.sum(dim=0), applies_FPG.any(dim=0)


def penalised_rewards(
    reward_PG: torch.Tensor, kl_PG: torch.Tensor | None, *, clip_range: tuple[float, float] | None, beta: float
) -> torch.Tensor:
    """R ← clip(R) − β · KL, shape [P, G]; `kl_PG` may be None when beta is 0."""
    if clip_range is not None:
        reward_PG = reward_PG.clamp(*clip_range)
    return reward_PG if beta == 0 or kl_PG is None else reward_PG - beta * kl_PG


def leave_one_out_advantages(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """Each scored row's reward less the mean of its scored siblings, shape [P, G].

    A_i = (1/(n−1)) Σ_j (R_i − R_j) over the n scored rows of the group: the same number as R_i − mean of the others,
    but equal rewards give exact zeros. Unscored rows, and groups with fewer than two scored rows, get 0.
    """
    pair_PGG = is_scored_PG[:, :, None] & is_scored_PG[:, None, :]
    safe_PG = torch.where(is_scored_PG, reward_PG, torch.zeros_like(reward_PG))
    difference_PGG = (safe_PG[:, :, None] - safe_PG[:, None, :]) * pair_PGG
    others_P = (is_scored_PG.sum(dim=1) - 1).clamp(min=1)
    return difference_PGG.sum(dim=2) / others_P[:, None]


def has_signal(is_scored_PG: torch.Tensor) -> torch.Tensor:
    """Which groups have at least two scored rows, shape [P]; the others carry no gradient."""
    return is_scored_PG.sum(dim=1) >= 2


def has_spread(reward_PG: torch.Tensor, is_scored_PG: torch.Tensor) -> torch.Tensor:
    """Which groups have two scored rows whose rewards differ, shape [P]; in the others every reward is its own baseline."""
    highest_P = reward_PG.masked_fill(~is_scored_PG, float("-inf")).amax(dim=1)
    lowest_P = reward_PG.masked_fill(~is_scored_PG, float("inf")).amin(dim=1)
    return has_signal(is_scored_PG) & (highest_P != lowest_P)


def normalize_advantages(advantage_PG: torch.Tensor, is_scored_PG: torch.Tensor, is_masked_PG: torch.Tensor) -> torch.Tensor:
    """(A − mean) / (std + 1e-4) over the scored, unmasked rows of the whole generation batch, shape [P, G].

    The standard deviation has n − 1 in the denominator. Unscored rows and rows of groups without signal keep 0.
    """
    sample = advantage_PG[is_scored_PG & ~is_masked_PG]
    if sample.numel() < 2:
        return advantage_PG
    normalized_PG = (advantage_PG - sample.mean()) / (sample.std() + STD_EPSILON)
    return torch.where(is_scored_PG & has_signal(is_scored_PG)[:, None], normalized_PG, torch.zeros_like(advantage_PG))
