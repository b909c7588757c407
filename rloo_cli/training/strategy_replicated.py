"""Everything on every rank, and a single process too; gradients are summed over the ranks once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import PreTrainedModel

from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import LocalState, SavedState
from rloo_cli.training import adapter as adapters
from rloo_cli.training import policy as policies
from rloo_cli.training.laid_out import LaidOut
from rloo_cli.training.microbatches import ScoringBatch
from rloo_cli.training.parts import Part, load_parts, local_flat, local_state_of, unique_names
from rloo_cli.training.policy import Policy, Scorer
from rloo_cli.training.strategy import MakeOptimizer

BUCKET_BYTES = 64 << 20
"""Gradients are summed in pieces of this size: large enough to be quick, small enough to have beside them."""


class Replicated(LaidOut):
    """Implements `strategy.Strategy`. Ranks need not run equally many passes: they meet once, for the gradient."""

    name: StrategyName = "ddp"
    is_lockstep = False
    is_sharded = False

    def __init__(self, accelerator: Accelerator, ranks: Ranks) -> None:
        self.accelerator = accelerator
        self.ranks = ranks

    def distribute(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """The policy on its device, not wrapped: a wrapper would communicate in each backward pass."""
        self._policy = policy.to(self.accelerator.device)
        self._optimizer = make_optimizer(policy)

    def make_reference(self, *, low_precision: torch.dtype | None) -> Scorer:
        """A frozen copy of the policy as it is now, in eval mode; with an adapter the same policy, the adapter off or as it is now."""
        if adapters.is_adapted(self.policy.model):
            return adapters.reference_of(self.policy)
        return policies.make_reference(self.policy, low_precision=low_precision)

    def decoding_model(self) -> PreTrainedModel:
        """The policy's own."""
        return self.policy.model

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """accelerate's, in the run's precision."""
        return self.accelerator.autocast()

    def forward(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's (log-prob, entropy), to be differentiated; no collective."""
        return self.policy(batch)

    def give_up_pass(self) -> None:
        """A pass leaves nothing behind."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to this rank's gradient; no collective."""
        self.accelerator.backward(loss)

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
        named = self.policy.model.named_parameters()
        return norm, next((n for n, p in named if p.grad is not None and not torch.isfinite(p.grad).all()), "their sum")

    def step(self, *, norm: torch.Tensor, max_norm: float) -> float:
        """Clip the gradient, update the weights, advance the schedule; returns the learning rate that was used."""
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self._trainable(), max_norm, norm)
        return self.optimizer.step()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors themselves, by state-dict name, or those that have the adapter in them; no collective."""
        return adapters.plain_tensors(self.policy.model)

    def first_non_finite(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity; None where all are finite. No collective."""
        return policies.first_non_finite(self.policy.model)

    def local_state(self) -> LocalState:
        """On the main rank all that is trained, and its optimizer state; nothing on the others, which have the same."""
        return local_state_of(self._parts() if self.ranks.is_main else (), self.optimizer)

    def load_state(self, saved: SavedState) -> None:
        """Take all of what was saved, by whatever strategy and number of ranks."""
        load_parts(self._parts(), self.optimizer, saved)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    def _parts(self) -> Iterator[Part]:
        model = self.policy.model
        trained = adapters.adapter_names(model) if adapters.is_adapted(model) else None
        for name, tensor in unique_names(model):
            if trained is not None and name not in trained:
                continue
            yield Part(name=name, shape=tuple(tensor.shape), start=0, values=local_flat(tensor), key=tensor)


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
