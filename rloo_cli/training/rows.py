"""Rows of a generation batch: chosen for a pass, and what is known of them in and out of [P, G]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from rloo_cli.algorithm.kl import sum_by_row
from rloo_cli.training.experience import Experience
from rloo_cli.training.microbatches import GroupRows, ScoringBatch


def select_rows(experience: Experience, groups: Iterable[int], wanted_PG: torch.Tensor) -> list[GroupRows]:
    """The wanted rows of each group; groups without any are left out."""
    width = experience.num_generations
    wanted = wanted_PG.tolist()
    selected = []
    for p in groups:
        members = [g for g in range(width) if wanted[p][g]]
        if members:
            group = experience.groups[p]
            selected.append(
                GroupRows(
                    group=p,
                    prompt_ids=group.prompt.token_ids,
                    rows=tuple(p * width + g for g in members),
                    completion_ids=tuple(group.completions[g].token_ids for g in members),
                    visual=group.prompt.visual,
                )
            )
    return selected


def take(value_PG: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The values of rows, by their number in the batch."""
    return value_PG.flatten()[list(rows)]


def put(value_PG: torch.Tensor, rows: Sequence[int], value_B: torch.Tensor) -> torch.Tensor:
    """A copy with the rows' values in their places."""
    flat = value_PG.flatten().clone()
    flat[list(rows)] = value_B.to(flat)
    return flat.view_as(value_PG)


def record_old(experience: Experience, batch: ScoringBatch, logp_N: torch.Tensor) -> Experience:
    """The experience that knows these rows' log-prob at the sampling policy."""
    # Summed exactly as the loss sums it, so that the ratio of an unchanged policy is exactly 1.
    logp_B = sum_by_row(logp_N.detach(), batch.row_N, len(batch.rows))
    return replace(experience, old_logp_PG=put(experience.old_logp_PG, batch.rows, logp_B))


def sampled_logprobs(experience: Experience, batch: ScoringBatch) -> torch.Tensor:
    """The engine's log-prob of every completion token of the micro-batch, [N]."""
    width = experience.num_generations
    values = [v for row in batch.rows for v in experience.groups[row // width].completions[row % width].logprobs]
    return torch.tensor(values, device=batch.row_N.device)
