"""ZeRO-3: a flat partition of every tensor on each rank; a module's tensors are whole only while it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.run.shards import SavedState
from rloo_cli.training.parts import Part, aliased
from rloo_cli.training.policy import Policy
from rloo_cli.training.skeleton import Exchange, agree_on_types, copy_buffers, empty_on, fill, lower, without_weights
from rloo_cli.training.strategy import MakeOptimizer
from rloo_cli.training.strategy_zero import Zero


class Zero3(Zero):
    """Implements `strategy.Strategy`: no rank has the whole of any tensor outside the module that uses it."""

    name: StrategyName = "zero3"
    stage = 3
    is_sharded = True

    def distribute(self, policy: Policy, make_optimizer: MakeOptimizer) -> None:
        """Send the main rank's weights to all a module at a time, and keep this rank's partitions."""
        agree_on_types(policy, self.ranks)
        self._skeleton = without_weights(policy)
        exact: dict[int, torch.Tensor] = {}
        exchange = Exchange(policy)
        for module in _upwards(policy):
            fill(module, exchange, self.ranks, self._device, recurse=False)
            if self._low is not None:
                exact |= self._exact_parts(module, self._low)
                lower(module, self._low, recurse=False)
            self._partition(module)
        copy_buffers(policy, self._skeleton)
        self._initialize(policy, make_optimizer)
        self._share_head(policy)
        own = dict(policy.model.named_parameters())
        for part in self._parts():
            if id(own[part.name]) in exact:
                part.values.copy_(exact[id(own[part.name])])

    def make_reference(self, *, low_precision: torch.dtype | None) -> Policy:
        """A frozen copy of the policy as it is now, in eval mode, partitioned likewise."""
        reference = self._take_skeleton().requires_grad_(False)
        if low_precision is not None:
            lower(reference, low_precision)
        exchange = Exchange(reference)
        for module in _upwards(reference):
            empty_on(module, exchange, self._device, recurse=False)
            self._partition(module)
        for theirs, own in zip(reference.parameters(), self.policy.parameters(), strict=True):
            theirs.ds_tensor.copy_(own.ds_tensor)
        self._reference_engine = self._engine_of(reference, None)
        self._share_head(reference)
        return reference.eval()

    def decoding_model(self) -> PreTrainedModel:
        """A model without weights, on the meta device, for whoever decodes with a copy of its own."""
        return self._take_skeleton().model

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole master weights by state-dict name, gathered one at a time on the device; every rank runs it to its end."""
        zero = self._engine.optimizer
        for names, tensor in aliased(self.policy.model):
            whole = zero.get_full_hp_param(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
            for name in names:
                yield name, whole

    def give_up_pass(self) -> None:
        """Let go of the tensors that a pass that raised had gathered."""
        for parameter in self.policy.parameters():
            parameter.ds_active_sub_modules.clear()
            if not parameter.ds_persist:
                parameter.partition()

    def zero_grad(self) -> None:
        """Drop all gradients, those of a step that was given up too."""
        zero = self._engine.optimizer
        zero.zero_grad()
        zero.averaged_gradients = {}

    def _partition(self, module: torch.nn.Module) -> None:
        """Keep this rank's partitions of a module's own tensors; its children's are partitioned."""
        self._deepspeed.zero.Init(module=module, config_dict_or_path=self._config, dtype=self._low or torch.float32)

    def _share_head(self, policy: Policy) -> None:
        """Tell that the policy's own forward pass uses the tensors of the LM head, a module that is never called."""
        for parameter in policy.model.get_output_embeddings().parameters():
            self._deepspeed.zero.register_external_parameter(policy, parameter)

    def _exact_parts(self, module: torch.nn.Module, low: torch.dtype) -> dict[int, torch.Tensor]:
        """This rank's parts of a module's own tensors that lose something in low precision, by the parameter's id."""
        lossy = {id(p): p.detach().flatten() for p in module.parameters(recurse=False) if not torch.equal(p.to(low).to(p.dtype), p)}
        return {number: flat[self._range(len(flat))].clone() for number, flat in lossy.items()}

    def _range(self, count: int) -> slice:
        """This rank's part of so many elements: as many on each rank, the last ones fewer or none."""
        size = -(-count // self.ranks.world_size)
        return slice(min(size * self.ranks.rank, count), min(size * (self.ranks.rank + 1), count))

    def _flats(self, zero: Any) -> Sequence[torch.Tensor]:
        return zero.fp32_partitioned_groups_flat

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        zero, names = self._engine.optimizer, self._names()
        found = []
        for group, parameters in enumerate(zero.fp16_groups):
            for parameter, piece in zip(parameters, zero.averaged_gradients[group], strict=True):
                own = self._range(parameter.ds_numel)
                found.append((names[id(parameter)], piece[: own.stop - own.start]))
        return found

    def _parts(self) -> Iterator[Part]:
        zero = self._engine.optimizer
        for name, parameter in self.policy.model.named_parameters():
            group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            own, key = self._range(parameter.ds_numel), self._flats(zero)[group]
            values = key.detach()[offset : offset + own.stop - own.start]
            yield Part(name=name, shape=tuple(parameter.ds_shape), start=own.start, values=values, key=key, offset=offset)

    def _follow_masters(self, saved: SavedState) -> None:
        zero = self._engine.optimizer
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := zero.persistent_parameters:
            for parameter in persistent:
                parameter.partition()
            persistent[0].all_gather(persistent)


def _upwards(policy: Policy) -> list[torch.nn.Module]:
    """Every module, children before their parents."""
    return list(reversed(list(policy.modules())))
