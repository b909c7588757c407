"""ZeRO by DeepSpeed: gradients and optimizer state in flat partitions (stage 2), weights too (stage 3). DeepSpeed is imported here
alone."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.shards import LocalState, SavedState
from rloo_cli.training.laid_out import LaidOut
from rloo_cli.training.microbatches import ScoringBatch
from rloo_cli.training.parts import Part, aliased, buffer_parts, load_parts, local_state_of
from rloo_cli.training.policy import Policy
from rloo_cli.training.sharded import clip_scale, first_bad, join_alone, total_norm
from rloo_cli.training.skeleton import Exchange, empty_on, lower, without_weights
from rloo_cli.training.strategy import MakeOptimizer

BUCKET_ELEMENTS = 1 << 24
"""Gradients are reduced, and weights gathered, in pieces of this size: 64 MB in float32."""


class Zero(LaidOut, ABC):
    """What both stages have in common. DeepSpeed's engine owns the optimizer step; ours says when, and with what gradient."""

    name: StrategyName
    stage: int
    is_lockstep = True

    def __init__(self, distribution: Distribution, accelerator: Accelerator, ranks: Ranks) -> None:
        self.accelerator = accelerator
        self.ranks = ranks
        self._device = accelerator.device
        join_alone(self._device)
        self._deepspeed = _deepspeed(self._device)
        self._low = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
        self._config = _config(self.stage, distribution, is_low=self._low is not None, is_cpu=self._device.type == "cpu")
        self._engine: Any = None
        self._skeleton: Policy | None = None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: the weights themselves are in the low precision."""
        return contextlib.nullcontext()

    def forward(self, batch: ScoringBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's (log-prob, entropy), to be differentiated."""
        return self._engine(batch)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradient, which is summed over the ranks and kept in partitions."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        # A rank's loss is its share of a sum, and DeepSpeed takes the mean over the ranks.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def gradient_norm(self) -> tuple[torch.Tensor, str]:
        """(norm of the gradient; name of a parameter where it is not finite, else '')."""
        return total_norm(self._gradients(), self.ranks, self._device)

    def step(self, *, norm: torch.Tensor, max_norm: float) -> float:
        """Clip the gradient, update this rank's partition, advance the schedule; returns the learning rate that was used."""
        if max_norm:
            scale = clip_scale(norm, max_norm)
            for _, gradient in self._gradients():
                gradient.mul_(scale)
        self._engine.step()
        return self.optimizer.advance()

    def first_non_finite(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity; None where all are finite."""
        return first_bad(((part.name, part.values) for part in self._parts()), self.ranks)

    def local_state(self) -> LocalState:
        """This rank's partition of weights and optimizer state."""
        buffers = buffer_parts(self.policy.model) if self.ranks.is_main else ()
        return local_state_of([*self._parts(), *buffers], self.optimizer)

    def load_state(self, saved: SavedState) -> None:
        """Take this rank's partition of what was saved, by whatever strategy and number of ranks."""
        load_parts([*self._parts(), *buffer_parts(self.policy.model)], self.optimizer, saved)
        self._follow_masters(saved)

    def _initialize(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """Give the policy to DeepSpeed, with our optimizer."""
        optimizer = make_optimizer(policy)
        self._engine = self._engine_of(policy, optimizer.inner)
        self._policy, self._optimizer = policy, optimizer
        zero = self._engine.optimizer
        if zero.optimizer is not optimizer.inner:  # it makes an Adagrad of its own, which has lost groups and schedule
            zero.optimizer = optimizer.inner
            optimizer.inner.state.clear()
            zero._link_all_hp_params()
            for flat in self._flats(zero):
                optimizer.inner.state[flat] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(flat, requires_grad=False)}

    def _engine_of(self, policy: Policy, optimizer: torch.optim.Optimizer | None) -> Any:
        engine, *_ = self._deepspeed.initialize(model=policy, optimizer=optimizer, config=self._config, dist_init_required=False)
        return engine

    def _take_skeleton(self) -> Policy:
        """The policy's structure on the meta device, set up as the policy is."""
        assert self._skeleton is not None
        skeleton = copy.deepcopy(self._skeleton)
        skeleton.layout, skeleton.head_chunk = self.policy.layout, self.policy.head_chunk
        return skeleton

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.policy.model.named_parameters()}

    @abstractmethod
    def _flats(self, zero: Any) -> Sequence[torch.Tensor]:
        """What the optimizer knows instead of parameters: this rank's flat master weights."""

    @abstractmethod
    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's parts of the gradient of the step, by parameter name."""

    @abstractmethod
    def _parts(self) -> Iterator[Part]:
        """This rank's parts of the master weights."""

    @abstractmethod
    def _follow_masters(self, saved: SavedState) -> None:
        """Make the weights that a pass uses what the master weights, just loaded, say."""


class Zero2(Zero):
    """Implements `strategy.Strategy`: every rank has the whole model, and a partition of gradient, master weights and optimizer state."""

    name: StrategyName = "zero2"
    stage = 2
    is_sharded = False

    def distribute(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """The policy on every rank's device, the rest in partitions."""
        policy.to(self._device)
        self._skeleton = without_weights(policy)
        exact = beyond(policy, self._low)
        self._initialize(policy, make_optimizer)
        for name, parameter in policy.named_parameters():
            if name in exact and (fragment := parameter._hp_mapping) is not None:
                address = fragment.lp_fragment_address
                fragment.hp_fragment.data.copy_(exact[name].flatten()[address.start : address.start + address.numel])

    def make_reference(self, *, low_precision: torch.dtype | None) -> Policy:
        """A frozen copy of the policy as it is now, in eval mode, whole on every rank; no collective."""
        reference = self._take_skeleton().requires_grad_(False)
        if low_precision is not None:
            lower(reference, low_precision)
        empty_on(reference, Exchange(reference), self._device)
        with torch.no_grad():
            for theirs, own in zip(reference.parameters(), self.policy.parameters(), strict=True):
                theirs.copy_(own)
        return reference.eval()

    def decoding_model(self) -> PreTrainedModel:
        """The policy's own."""
        return self.policy.model

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole master weights by state-dict name; under bf16 gathered one at a time, so every rank runs it to its end."""
        for names, tensor in aliased(self.policy.model):
            is_low = self._low is not None and isinstance(tensor, torch.nn.Parameter)
            whole = tensor.get_full_hp_param() if is_low else tensor.detach()
            for name in names:
                yield name, whole

    def give_up_pass(self) -> None:
        """A forward pass leaves nothing behind."""

    def zero_grad(self) -> None:
        """Drop all gradients, those of a step that was given up too."""
        zero = self._engine.optimizer
        zero.zero_grad()
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None

    def _flats(self, zero: Any) -> Sequence[torch.Tensor]:
        return zero.single_partition_of_fp32_groups

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        zero, names = self._engine.optimizer, self._names()
        found = []
        for group, parameters in enumerate(zero.params_in_partition):
            pieces = [piece for piece in zero.averaged_gradients[group] if not getattr(piece, "_zero_padding", False)]
            found += [(names[id(p)], piece) for p, piece in zip(parameters, pieces, strict=False)]
        return found

    def _parts(self) -> Iterator[Part]:
        zero = self._engine.optimizer
        flats = {id(p): flat for group, flat in zip(zero.bit16_groups, self._flats(zero), strict=True) for p in group}
        for name, parameter in self.policy.model.named_parameters():
            key, shape, fragment = flats[id(parameter)], tuple(parameter.shape), parameter._hp_mapping
            if fragment is None:  # it lies in another rank's partition
                yield Part(name=name, shape=shape, start=0, values=key.detach()[:0], key=key)
            else:
                values, offset = fragment.hp_fragment.detach(), fragment.hp_fragment_address.start
                yield Part(name=name, shape=shape, start=fragment.lp_fragment_address.start, values=values, key=key, offset=offset)

    def _follow_masters(self, saved: SavedState) -> None:
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(saved.model.read(name).view(parameter.shape))


def beyond(policy: Policy, low: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The parameters that lose something in low precision, copied to the CPU as they are."""
    if low is None:
        return {}
    named = ((name, p.detach()) for name, p in policy.named_parameters())
    return {name: p.to("cpu", copy=True) for name, p in named if not torch.equal(p.to(low).to(p.dtype), p)}


def _deepspeed(device: torch.device) -> ModuleType:
    """The library, told once that it runs on this kind of device, in the process group that is there."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    if device.type == "cpu":  # a shared-memory transport that takes a minute and a half to compile; gloo does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    return deepspeed


def _config(stage: int, distribution: Distribution, *, is_low: bool, is_cpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. Micro-batches, clipping and schedule are ours."""
    sizes = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS, "overlap_comm": not is_cpu}
    if stage == 3 and is_cpu:
        sizes["stage3_param_persistence_threshold"] = 0  # small parameters are whole everywhere only to spare GPUs many small transfers
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": is_low},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage, **sizes, **distribution.zero},
    }
