"""How the weights lie over the ranks, and what an update needs of that: the seam where sharded weights would come in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator

from rloo_cli.run.ranks import Ranks
from rloo_cli.training.optimizer import OptimizerAndSchedule
from rloo_cli.training.policy import Policy

BUCKET_BYTES = 64 << 20
"""Gradients are summed in pieces of this size: large enough to be quick, small enough to have beside them."""


class Replicated:
    """Every rank has all of it, a single process too; gradients are summed over the ranks once a step."""

    def __init__(self, accelerator: Accelerator, ranks: Ranks) -> None:
        self.accelerator = accelerator
        self.ranks = ranks
        self._policy: Policy | None = None

    @property
    def policy(self) -> Policy:
        """What was prepared."""
        assert self._policy is not None
        return self._policy

    def prepare(self, policy: Policy) -> Policy:
        """The policy on its device, not wrapped: a wrapper would communicate in each backward pass."""
        self._policy = self.accelerator.prepare_model(policy, evaluation_mode=self.ranks.world_size > 1)
        return self._policy

    def gradient_norm(self) -> tuple[torch.Tensor, str]:
        """(norm of the gradient, which is now the sum over ranks; name of a parameter where it is not finite, else '')."""
        parameters = self._trainable()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.ranks.world_size > 1:
            sum_over_ranks(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            return norm, ""
        named = self.policy.named_parameters()
        return norm, next((n for n, p in named if p.grad is not None and not torch.isfinite(p.grad).all()), "their sum")

    def step(self, optimizer: OptimizerAndSchedule, *, norm: torch.Tensor, max_norm: float) -> float:
        """Clip the gradient, update the weights, advance the schedule; returns the learning rate that was used."""
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self._trainable(), max_norm, norm)
        return optimizer.step()

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.policy.parameters() if p.requires_grad]


def sum_over_ranks(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, several in one transfer; a collective."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
