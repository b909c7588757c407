"""The KL penalty: the k1 estimate summed over a completion."""

from __future__ import annotations

import torch


def sequence_kl(logp_N: torch.Tensor, ref_logp_N: torch.Tensor, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """KL_i = Σ_t (log π_θ(y_t) − log π_ref(y_t)), shape [num_rows], float64, nats; detached.

    It may be negative: its expectation under π_θ is the KL divergence, a single draw is not.

    Args:
        logp_N: policy log-probs of all completion tokens, concatenated.
        ref_logp_N: the reference's, in the same order.
        row_N: the row that each token belongs to.
        num_rows: B.
    """
    return sum_by_row((logp_N - ref_logp_N).detach().double(), row_N, num_rows)


def sum_by_row(value_N: torch.Tensor, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The sum of each row's token values, shape [num_rows]; differentiable."""
    return torch.zeros(num_rows, dtype=value_N.dtype, device=value_N.device).index_add(0, row_N, value_N)
