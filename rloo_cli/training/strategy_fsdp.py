"""FSDP2: each rank has some rows of every tensor; a layer is whole only while it is used."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import LocalState, SavedState
from rloo_cli.training.laid_out import LaidOut
from rloo_cli.training.microbatches import ScoringBatch
from rloo_cli.training.parts import Part, aliased, load_parts, local_flat, local_state_of, unique_names
from rloo_cli.training.policy import Policy
from rloo_cli.training.sharded import clip_scale, first_bad, join_alone, total_norm
from rloo_cli.training.skeleton import Exchange, agree_on_types, copy_buffers, empty_on, fill, lower, without_weights
from rloo_cli.training.strategy import MakeOptimizer

logger = logging.getLogger(__name__)


class FullySharded(LaidOut):
    """Implements `strategy.Strategy` by torch's `fully_shard`: every decoder layer, then the policy with what is left."""

    name: StrategyName = "fsdp2"
    is_lockstep = True
    is_sharded = True

    def __init__(self, distribution: Distribution, accelerator: Accelerator, ranks: Ranks) -> None:
        self.accelerator = accelerator
        self.ranks = ranks
        self._device = accelerator.device
        join_alone(self._device)
        self._mesh: DeviceMesh = init_device_mesh(self._device.type, (ranks.world_size,))
        low = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
        self._options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": distribution.reshard_after_forward,
            "offload_policy": _offload_policy(distribution, self._device),
            "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
        }
        self._skeleton: Policy | None = None

    def distribute(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """Send the main rank's weights to all a layer at a time, and keep this rank's rows."""
        agree_on_types(policy, self.ranks)
        self._skeleton = without_weights(policy)
        exchange = Exchange(policy)
        for module in [*_layers(policy.model), policy]:
            fill(module, exchange, self.ranks, self._device)
            # The root, of which the backward pass needs the head at once, stays whole until then.
            self._shard(module, self._options | ({"reshard_after_forward": False} if module is policy else {}))
        copy_buffers(policy, self._skeleton)
        self._policy = policy
        self._optimizer = make_optimizer(policy)

    def make_reference(self, *, low_precision: torch.dtype | None) -> Policy:
        """A frozen copy of the policy as it is now, in eval mode, sharded likewise; no collective.

        Under bf16 its weights are kept in bf16, which is what a forward pass makes of the policy's.
        """
        _reshard(self.policy)
        reference = self._new_skeleton().requires_grad_(False)
        reference.layout, reference.head_chunk = self.policy.layout, self.policy.head_chunk
        if low_precision is not None:
            lower(reference, low_precision)
        exchange = Exchange(reference)
        for module in [*_layers(reference.model), reference]:
            empty_on(module, exchange, self._device)
            self._shard(module, self._options | {"reshard_after_forward": True})  # no backward pass would let go of it
        with torch.no_grad():
            for theirs, own in zip(reference.parameters(), self.policy.parameters(), strict=True):
                local_flat(theirs).copy_(local_flat(own))
        return reference.eval()

    def decoding_model(self) -> PreTrainedModel:
        """A model without weights, on the meta device, for whoever decodes with a copy of its own."""
        return self._new_skeleton().model

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: a layer's whole weights are in the low precision."""
        return contextlib.nullcontext()

    def forward(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's (log-prob, entropy), to be differentiated."""
        return self.policy(batch)

    def give_up_pass(self) -> None:
        """Have the next pass begin anew: torch takes one that raised for still running."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._training_state, state._state_ctx.iter_forward_root = TrainingState.IDLE, None
        _reshard(self.policy)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradient, which is summed over the ranks and kept in rows."""
        loss.backward()

    def gradient_norm(self) -> tuple[torch.Tensor, str]:
        """(norm of the gradient; name of a parameter where it is not finite, else '')."""
        named = list(self.policy.model.named_parameters())
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [(name, local_flat(p.grad)) for name, p in named if p.grad is not None]
        return total_norm(gradients, self.ranks, self._device)

    def step(self, *, norm: torch.Tensor, max_norm: float) -> float:
        """Clip the gradient, update this rank's rows, advance the schedule; returns the learning rate that was used."""
        if max_norm:
            scale = clip_scale(norm, max_norm)
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    local_flat(parameter.grad).mul_(scale)
        return self.optimizer.step()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the policy's model by state-dict name, gathered one at a time on the device; every rank runs it to its end."""
        _reshard(self.policy)
        for names, tensor in aliased(self.policy.model):
            whole = tensor.detach()
            if isinstance(whole, DTensor):
                whole = whole.to(self._device).full_tensor()
            for name in names:
                yield name, whole

    def first_non_finite(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity; None where all are finite."""
        _reshard(self.policy)
        return first_bad([(name, local_flat(p)) for name, p in self.policy.model.named_parameters()], self.ranks)

    def local_state(self) -> LocalState:
        """This rank's rows of weights and optimizer state."""
        parts = (part for part in self._parts() if self.ranks.is_main or isinstance(part.key, DTensor))
        return local_state_of(parts, self.optimizer)

    def load_state(self, saved: SavedState) -> None:
        """Take this rank's rows of what was saved, by whatever strategy and number of ranks."""
        load_parts(self._parts(), self.optimizer, saved)

    def _parts(self) -> Iterator[Part]:
        _reshard(self.policy)
        for name, tensor in unique_names(self.policy.model):
            shape, start = tuple(tensor.shape), 0
            if isinstance(tensor, DTensor):
                rows = -(-shape[0] // self.ranks.world_size)  # as torch.chunk cuts
                start = min(rows * self.ranks.rank, shape[0]) * math.prod(shape[1:])
            yield Part(name=name, shape=shape, start=start, values=local_flat(tensor), key=tensor)

    def _shard(self, module: torch.nn.Module, options: dict[str, Any]) -> None:
        sharded = fully_shard(module, **options)
        assert isinstance(sharded, FSDPModule)
        # A rank's loss is its share of a sum: gradients are added up, where torch would take their mean.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)

    def _new_skeleton(self) -> Policy:
        assert self._skeleton is not None
        return copy.deepcopy(self._skeleton)


def _offload_policy(distribution: Distribution, device: torch.device) -> OffloadPolicy:
    """Whether parts stay in the machine's memory; where that is the device's own there is nothing to offload, which is told."""
    if not distribution.cpu_offload:
        return OffloadPolicy()
    if device.type == "cpu":
        logger.warning("fsdp_offload_params is without effect here: training is on the CPU")
        return OffloadPolicy()
    return CPUOffloadPolicy()


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that transformers says may not be split: the decoder layers."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _reshard(policy: Policy) -> None:
    """Let go of what the last forward pass left whole: parameters are this rank's rows afterwards."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
