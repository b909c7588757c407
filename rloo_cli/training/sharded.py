"""What the strategies that shard have in common: norms and checks over parts that lie on different ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from rloo_cli.run.ranks import Ranks

CLIP_EPSILON = 1e-6
"""As torch's own clipping has it."""


def total_norm(gradients: Sequence[tuple[str, torch.Tensor]], ranks: Ranks, device: torch.device) -> tuple[torch.Tensor, str]:
    """(norm over the parts of all ranks; name of a parameter whose part is not finite, else ''); a collective.

    Every rank names the same parameters in the same order; a rank may have nothing of one.
    """
    own = torch.nn.utils.get_total_norm([part for _, part in gradients if part.numel()]).item()
    norms = ranks.gather(own)
    norm = math.sqrt(math.fsum(value * value for value in norms))
    bad = first_bad(gradients, ranks) or "their sum" if not math.isfinite(norm) else ""
    return torch.tensor(norm, dtype=torch.float64, device=device), bad


def clip_scale(norm: torch.Tensor, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`."""
    return min(1.0, max_norm / (norm.item() + CLIP_EPSILON))


def first_bad(named: Iterable[tuple[str, torch.Tensor]], ranks: Ranks) -> str | None:
    """The first name, in the order that all ranks have, whose part holds NaN or infinity on some rank; a collective."""
    own = next(((i, name) for i, (name, part) in enumerate(named) if not torch.isfinite(part).all()), None)
    return min((found for found in ranks.gather(own) if found is not None), default=(0, None))[1]


def join_alone(device: torch.device) -> None:
    """A process group of one, where a single process shards."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
