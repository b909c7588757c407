"""Metrics that come out of a differentiated pass, summed over its micro-batches."""

from __future__ import annotations

import torch

from rloo_cli.algorithm.loss import effective_sample_size


class PassMetrics:
    """Collects from each micro-batch; `summary` gives the step's values. Everything is over the rows that were in the pass."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.entropies: list[torch.Tensor] = []
        self.gaps: list[torch.Tensor] = []
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.clipped: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, entropy_N: torch.Tensor) -> None:
        """Add a micro-batch's share of the loss and the entropies of its tokens (nats)."""
        self.loss += loss.item()
        self.entropies.append(entropy_N)

    def add_sampler_gap(self, logp_N: torch.Tensor, sampled_N: torch.Tensor, logp_B: torch.Tensor, sampler_B: torch.Tensor) -> None:
        """Add how far the engine's log-probs are from the trainer's, by token and by row."""
        self.gaps.append((logp_N.detach() - sampled_N).abs())
        self.rows.append((logp_B.detach(), sampler_B))

    def add_clipped(self, clipped_B: torch.Tensor) -> None:
        """Add which rows the clip took out of the gradient."""
        self.clipped.append(clipped_B)

    def summary(self, *, off_policy: bool) -> dict[str, float]:
        """The step's metrics by their documented names; what does not exist is absent."""
        result = {"loss": self.loss + 0.0}
        if self.entropies:
            result["entropy"] = torch.cat(self.entropies).double().mean().item()
        if self.gaps:
            gap_N = torch.cat(self.gaps).double()
            logp_B, sampler_B = (torch.cat(parts).double() for parts in zip(*self.rows, strict=True))
            result["sampling/logp_diff_mean"] = gap_N.mean().item()
            result["sampling/logp_diff_max"] = gap_N.max().item()
            result["sampling/ess"] = effective_sample_size(logp_B, sampler_B).item()
        if not off_policy:
            result["clip_ratio/region_mean"] = 0.0
        elif self.clipped:
            result["clip_ratio/region_mean"] = torch.cat(self.clipped).double().mean().item()
        return result
