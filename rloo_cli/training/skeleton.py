"""Models without weights, and how the main rank's weights come to all ranks a module at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from rloo_cli.run.ranks import Ranks

M = TypeVar("M", bound=torch.nn.Module)


def without_weights(module: M) -> M:
    """A copy whose parameters are on the meta device; ties stay, buffers are copied."""
    empty = {id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo=dict(empty))


def agree_on_types(model: torch.nn.Module, ranks: Ranks) -> None:
    """Give the tensors of a model without weights the types that the main rank's have, which a configuration alone does not tell."""
    types = ranks.broadcast({path: getattr(owner, name).dtype for owner, name, path in _places(model)})
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for owner, name, path in _places(model):
        old = getattr(owner, name)
        if old.is_meta and old.dtype != types[path]:
            done.setdefault(id(old), (old, _like(old, torch.empty_like(old, dtype=types[path]))))
            setattr(owner, name, done[id(old)][1])


def fill(module: torch.nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Whole parameters and buffers on every rank's device, out of the main rank's model; a collective. What is sharded already stays."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old ones are kept, so that no id is given twice
    for owner, name, _ in _places(module):
        old = getattr(owner, name)
        if type(old.data) is not torch.Tensor:
            continue
        if id(old) not in done:
            new = torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device)
            if ranks.world_size > 1:
                dist.broadcast(new, src=0)
            done[id(old)] = (old, _like(old, new))
        setattr(owner, name, done[id(old)][1])


def empty_on(module: torch.nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by ones of unknown value on a device; ties stay."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for owner, name, _ in _places(module):
        old = getattr(owner, name)
        if old.is_meta and type(old.data) is torch.Tensor:
            if id(old) not in done:
                done[id(old)] = (old, _like(old, torch.empty_like(old, device=device)))
            setattr(owner, name, done[id(old)][1])


def copy_buffers(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give a model the buffers of another of the same structure, those that no state dict has (rotary frequencies) too."""
    theirs = dict(source.named_buffers(remove_duplicate=False))
    for owner, name, path in _places(target):
        if path in theirs:
            setattr(owner, name, theirs[path].detach().clone())


def _places(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """(module, attribute, full name) of every parameter and buffer, tied ones at each place."""
    for prefix, owner in list(module.named_modules()):
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield owner, name, f"{prefix}.{name}" if prefix else name


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
