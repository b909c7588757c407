"""What a rank has of weights and optimizer state, as contiguous ranges of flattened parameters, whatever laid them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rloo_cli.run.shards import LocalState, SavedState, SavedTensors, Shard
from rloo_cli.training.optimizer import OptimizerAndSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's range of one parameter, or of a persistent buffer."""

    name: str
    """In the model's state dict."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Where the range begins in the flattened tensor."""
    values: torch.Tensor
    """1-D view of what the optimizer updates; empty where the rank has none of it."""
    key: torch.Tensor
    """What the optimizer keeps its state by: the parameter, or a flat buffer with several of them."""
    offset: int = 0
    """Where the range begins in this rank's part of `key`, flattened."""


def aliased(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """(all its names, tensor) of each parameter and persistent buffer, in the order of the state dict; tied weights have several names."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def unique_names(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by state-dict name, tied ones once, under their first name."""
    return [(names[0], tensor) for names, tensor in aliased(model)]


def buffer_parts(model: torch.nn.Module) -> list[Part]:
    """The persistent buffers of a model, which every rank has whole."""
    named = [(name, tensor) for name, tensor in unique_names(model) if not isinstance(tensor, torch.nn.Parameter)]
    return [Part(name=name, shape=tuple(b.shape), start=0, values=local_flat(b), key=b) for name, b in named]


def local_flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor, 1-D, sharing its memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)


def local_state_of(parts: Iterable[Part], optimizer: OptimizerAndSchedule) -> LocalState:
    """Weights and optimizer state of the parts; the values are views, so they change with the next step."""
    model: dict[str, Shard] = {}
    state: dict[str, Shard] = {}
    scalars: dict[str, Any] = {}
    for part in parts:
        model[part.name] = Shard(values=part.values, start=part.start, shape=part.shape)
        for entry, value in optimizer.inner.state.get(part.key, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[f"{entry}/{part.name}"] = _shard(part, value)
            else:
                scalars[f"{entry}/{part.name}"] = _scalar(value)
    return LocalState(model=model, optimizer=state, document={"scalars": scalars, **optimizer.document()})


def _shard(part: Part, value: torch.Tensor) -> Shard:
    if value.numel() != part.key.numel():  # a factor of Adafactor's, which has a shape of its own
        return Shard(values=value.detach().reshape(-1), start=0, shape=tuple(value.shape))
    return Shard(values=_range(part, value), start=part.start, shape=part.shape)


def _range(part: Part, value: torch.Tensor) -> torch.Tensor:
    return local_flat(value)[part.offset : part.offset + part.values.numel()]


def _scalar(value: Any) -> dict[str, Any] | float:
    """A number as JSON; whether it was a tensor is told, since optimizers want back what they had."""
    if isinstance(value, torch.Tensor):
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def load_parts(parts: Iterable[Part], optimizer: OptimizerAndSchedule, saved: SavedState) -> None:
    """Put what was saved into the parts, and into the optimizer's state for them."""
    state: dict[torch.Tensor, dict[str, Any]] = optimizer.inner.state
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.inner.param_groups)
    tensors, scalars = _by_parameter(saved.optimizer.names), _by_parameter(saved.document["scalars"])
    for part in parts:
        part.values.copy_(saved.model.read(part.name, part.start, part.start + part.values.numel()))
        for entry in tensors.get(part.name, ()):
            _load_tensor(part, entry, state[part.key], saved.optimizer)
        for entry in scalars.get(part.name, ()):
            device = part.key.device if counts_on_device or entry != "step" else torch.device("cpu")
            state[part.key][entry] = _number(saved.document["scalars"][f"{entry}/{part.name}"], device)
    optimizer.load_document(saved.document)


def _by_parameter(keys: Iterable[str]) -> dict[str, list[str]]:
    """The entries of optimizer state that each parameter has, from keys `<entry>/<parameter name>`."""
    entries: dict[str, list[str]] = {}
    for key in keys:
        entry, _, name = key.partition("/")
        entries.setdefault(name, []).append(entry)
    return entries


def _load_tensor(part: Part, entry: str, state: dict[str, Any], saved: SavedTensors) -> None:
    key = f"{entry}/{part.name}"
    if saved.shape(key) != part.shape:  # a factor of Adafactor's
        state[entry] = saved.read(key).view(saved.shape(key)).to(part.key.device)
        return
    if entry not in state:
        state[entry] = torch.zeros_like(part.key, requires_grad=False)
    _range(part, state[entry]).copy_(saved.read(key, part.start, part.start + part.values.numel()))


def _number(value: dict[str, Any] | float, device: torch.device) -> torch.Tensor | float:
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]), device=device)
    return value
