"""The losses of an optimizer step. All return a scalar; N is the step's global number of unmasked rows.

Source: Ahmadian et al. 2024, arXiv 2402.14740 (REINFORCE form); Schulman et al. 2017, arXiv 1707.06347, equation 7 (clipping).
"""

from __future__ import annotations

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside any clip range, still finite in float32


def reinforce_loss(logp_B: torch.Tensor, advantage_B: torch.Tensor, n: int, weight_B: torch.Tensor | None = None) -> torch.Tensor:
    """L = −(1/N) Σ w_i A_i ℓ_i; `weight_B` (constant, default 1) is the importance correction."""
    coefficient_B = advantage_B if weight_B is None else advantage_B * weight_B
    return -(coefficient_B.to(logp_B) * logp_B).sum() / max(n, 1)


def sequence_ratio(logp_B: torch.Tensor, old_logp_B: torch.Tensor) -> torch.Tensor:
    """ρ_i = exp(ℓ_i − ℓ_i^old), shape [B], the exponent bounded before exp so that it stays finite."""
    return torch.exp((logp_B - old_logp_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_loss(
    ratio_B: torch.Tensor, advantage_B: torch.Tensor, n: int, *, epsilon: float, epsilon_high: float, weight_B: torch.Tensor | None = None
) -> torch.Tensor:
    """L = −(1/N) Σ w_i min(ρ_i A_i, clip(ρ_i, 1−ε, 1+ε_high) A_i), a ratio per sequence."""
    advantage_B = advantage_B.to(ratio_B)
    surrogate_B = torch.minimum(ratio_B * advantage_B, ratio_B.clamp(1 - epsilon, 1 + epsilon_high) * advantage_B)
    if weight_B is not None:
        surrogate_B = surrogate_B * weight_B.to(ratio_B)
    return -surrogate_B.sum() / max(n, 1)


def is_clipped(ratio_B: torch.Tensor, advantage_B: torch.Tensor, *, epsilon: float, epsilon_high: float) -> torch.Tensor:
    """Which rows the clip takes out of the gradient, shape [B], bool."""
    return ((ratio_B < 1 - epsilon) & (advantage_B < 0)) | ((ratio_B > 1 + epsilon_high) & (advantage_B > 0))


def importance_weights(
    logp_B: torch.Tensor, sampler_logp_B: torch.Tensor, mode: Literal["none", "truncate", "mask"], cap: float
) -> torch.Tensor | None:
    """sg[min(c, exp(ℓ_i − ℓ_i^sampler))], or 0 beyond the cap for `mask`; None for `none`. Shape [B], constant."""
    if mode == "none":
        return None
    ratio_B = sequence_ratio(logp_B.detach(), sampler_logp_B)
    if mode == "truncate":
        return ratio_B.clamp(max=cap)
    return torch.where(ratio_B > cap, torch.zeros_like(ratio_B), ratio_B)


def effective_sample_size(logp_B: torch.Tensor, sampler_logp_B: torch.Tensor) -> torch.Tensor:
    """(Σ w)² / (B Σ w²) with w = exp(ℓ − ℓ^sampler): 1 when sampler and trainer agree. Scalar."""
    ratio_B = sequence_ratio(logp_B.detach(), sampler_logp_B)
    return ratio_B.sum() ** 2 / (ratio_B.numel() * (ratio_B**2).sum())
