"""Metrics that come out of a differentiated pass, summed over its micro-batches and then over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rloo_cli.algorithm.loss import effective_sample_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSums:
    """What one rank adds to the step's values."""

    loss: float
    entropy: float
    """Summed over `tokens`, nats."""
    tokens: int
    gap: float
    """|trainer's − sampler's log-prob| summed over `gap_tokens`, nats."""
    gap_max: float
    gap_tokens: int
    rows: tuple[tuple[float, float], ...]
    """(trainer's, sampler's) log-prob of each row."""
    clipped: int
    clip_rows: int
    router: float | None
    """The routers' auxiliary loss, its share of the step's mean; None without one."""


class PassMetrics:
    """Collects from each micro-batch of this rank. Everything is over the rows that were in the pass."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.entropies: list[torch.Tensor] = []
        self.gaps: list[torch.Tensor] = []
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.clipped: list[torch.Tensor] = []
        self.router: float | None = None

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

    def add_router(self, share: float, coefficient: float) -> None:
        """Add a micro-batch's share of the routers' auxiliary loss, with what it is to the loss."""
        self.router = (self.router or 0.0) + share
        self.loss += coefficient * share

    def sums(self) -> PassSums:
        """This rank's sums."""
        entropy_N, gap_N, clipped_B = (
            torch.cat(parts).double() if parts else torch.zeros(0) for parts in (self.entropies, self.gaps, self.clipped)
        )
        return PassSums(
            loss=self.loss,
            entropy=entropy_N.sum().item(),
            tokens=len(entropy_N),
            gap=gap_N.sum().item(),
            gap_max=gap_N.max().item() if len(gap_N) else 0.0,
            gap_tokens=len(gap_N),
            rows=tuple(pair for ours, theirs in self.rows for pair in zip(ours.tolist(), theirs.tolist(), strict=True)),
            clipped=int(clipped_B.sum().item()),
            clip_rows=len(clipped_B),
            router=self.router,
        )


def summarise(parts: Sequence[PassSums], *, off_policy: bool) -> dict[str, float]:
    """The step's metrics by their documented names, from the sums of all ranks; what does not exist is absent."""
    result = {"loss": sum(part.loss for part in parts) + 0.0}
    if tokens := sum(part.tokens for part in parts):
        result["entropy"] = sum(part.entropy for part in parts) / tokens
    if gap_tokens := sum(part.gap_tokens for part in parts):
        result["sampling/logp_diff_mean"] = sum(part.gap for part in parts) / gap_tokens
        result["sampling/logp_diff_max"] = max(part.gap_max for part in parts)
        rows = torch.tensor([pair for part in parts for pair in part.rows], dtype=torch.float64)
        result["sampling/ess"] = effective_sample_size(rows[:, 0], rows[:, 1]).item()
    if any(part.router is not None for part in parts):
        result["aux_loss"] = sum(part.router or 0.0 for part in parts)
    if not off_policy:
        result["clip_ratio/region_mean"] = 0.0
    elif clip_rows := sum(part.clip_rows for part in parts):
        result["clip_ratio/region_mean"] = sum(part.clipped for part in parts) / clip_rows
    return result
