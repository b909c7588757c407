"""How model, gradient and optimizer lie over the ranks: the seam between an update and whatever shards it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import LocalState, SavedState
from rloo_cli.training.microbatches import ScoringBatch
from rloo_cli.training.optimizer import OptimizerAndSchedule
from rloo_cli.training.policy import Policy, Scorer

if TYPE_CHECKING:
    from rloo_cli.recipe.accelerate_keys import StrategyName
    from rloo_cli.recipe.distribution import Distribution

MakeOptimizer = Callable[[Policy], OptimizerAndSchedule]
"""The recipe's optimizer over whatever parameters the policy has once it is laid out."""


class Strategy(Protocol):
    """Where the weights are, and what an update needs of that.

    Unless it says otherwise, a method is a collective: every rank calls it, in the same order.
    """

    name: StrategyName
    is_lockstep: bool
    """Whether forward or backward passes are collectives, so that every rank has to run as many as the others."""
    is_sharded: bool
    """Whether no rank holds the whole model."""

    @property
    def policy(self) -> Policy:
        """What was laid out."""

    @property
    def optimizer(self) -> OptimizerAndSchedule:
        """What updates it."""

    def distribute(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """Lay the policy out on the ranks' devices. It is whole on the main rank's CPU; on the others too, or without weights where `is_sharded`."""

    def make_reference(self, *, low_precision: torch.dtype | None) -> Scorer:
        """What scores as the policy does now, in eval mode, and never changes: a frozen copy, laid out likewise, where there is no adapter."""

    def decoding_model(self) -> PreTrainedModel:
        """The model for whoever decodes with transformers: the policy's own, or one on the meta device where no rank holds it. No collective."""

    def autocast(self) -> AbstractContextManager[None]:
        """Around every pass of policy and reference: the run's precision, where the weights do not have it themselves. No collective."""

    def forward(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's (log-prob, entropy), as its own call, for a `backward` to follow."""

    def give_up_pass(self) -> None:
        """Clear up after a forward pass that failed on every rank at the same place. No collective."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradient. `is_last`: no other backward pass comes before the step. The loss is a share: over the ranks they are summed."""

    def gradient_norm(self) -> tuple[torch.Tensor, str]:
        """(norm of the gradient, summed over ranks; name of a parameter where it is not finite, else '')."""

    def step(self, *, norm: torch.Tensor, max_norm: float) -> float:
        """Clip the gradient, update the weights, advance the schedule; returns the learning rate that was used."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the policy's model by state-dict name; every rank runs it to its end.

        They are gathered one (layer) at a time on the device and hold until the next is asked for; aliases of a tied weight follow its first
        name with the same tensor.
        """

    def first_non_finite(self) -> str | None:
        """The name of the first parameter of the model that holds NaN or infinity; None where all are finite."""

    def local_state(self) -> LocalState:
        """This rank's part of weights and optimizer state. No collective."""

    def load_state(self, saved: SavedState) -> None:
        """Take this rank's part of what was saved, by whatever strategy and number of ranks. No collective."""


def make_strategy(distribution: Distribution, accelerator: Accelerator, ranks: Ranks) -> Strategy:
    """The strategy that was asked for."""
    match distribution.strategy:
        case "ddp":
            from rloo_cli.training.strategy_replicated import Replicated

            return Replicated(accelerator, ranks)
        case "fsdp2":
            from rloo_cli.training.strategy_fsdp import FullySharded

            return FullySharded(distribution, accelerator, ranks)
        case "zero2":
            from rloo_cli.training.strategy_zero import Zero2

            return Zero2(distribution, accelerator, ranks)
        case "zero3":
            from rloo_cli.training.strategy_zero3 import Zero3

            return Zero3(distribution, accelerator, ranks)
