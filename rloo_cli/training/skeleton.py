"""Models without weights, and how the main rank's weights come to all ranks a module at a time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from rloo_cli.errors import RefusedError
from rloo_cli.run.ranks import Ranks

M = TypeVar("M", bound=torch.nn.Module)


class Exchange:
    """Replaces the tensors of a model, module by module; a tied one is replaced once, and by the same at each of its places."""

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = [getattr(owner, name) for owner, name, _ in places(model)]
        count = Counter(id(tensor) for tensor in tensors)
        self._tied = {id(tensor): tensor for tensor in tensors if count[id(tensor)] > 1}
        self._done: dict[int, torch.Tensor] = {}

    def replace(self, owner: torch.nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put what `make` makes of a tensor in its place, as a parameter where it was one."""
        old = getattr(owner, name)
        new = self._done.get(id(old))
        if new is None:
            new = make(old)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            if id(old) in self._tied:
                self._done[id(old)] = new
        setattr(owner, name, new)


def without_weights(module: M) -> M:
    """A copy whose parameters are on the meta device; ties stay, buffers are copied."""
    empty = {id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo=dict(empty))


def agree_on_types(model: torch.nn.Module, ranks: Ranks) -> None:
    """Give the tensors of a model without weights the types that the main rank's have, which a configuration alone does not tell.

    Raises:
        RefusedError: the main rank's model has other tensors, so that the ranks could not go through them together.
        NeighbourError: so it is on another rank.
    """
    own = {path: getattr(owner, name) for owner, name, path in places(model)}
    first = {id(tensor): path for path, tensor in reversed(own.items())}
    described = [(path, tuple(tensor.shape), first[id(tensor)]) for path, tensor in own.items()]
    theirs, types = ranks.broadcast((described, {path: tensor.dtype for path, tensor in own.items()}))
    ranks.together(lambda: _refuse_others(theirs, described))
    exchange = Exchange(model)
    for owner, name, path in places(model):
        if getattr(owner, name).is_meta:
            exchange.replace(owner, name, lambda old, dtype=types[path]: old.to(dtype))  # type: ignore[misc]


def _refuse_others(theirs: list[tuple[str, tuple[int, ...], str]], own: list[tuple[str, tuple[int, ...], str]]) -> None:
    if own != theirs:
        name = next((ours[0] for ours, other in zip(own, theirs, strict=False) if ours != other), "their number")
        raise RefusedError(
            f"this process would build another model than rank 0 has loaded; they differ in {name}: give all machines the same files, and the "
            "same version of transformers."
        )


def fill(module: torch.nn.Module, exchange: Exchange, ranks: Ranks, device: torch.device, *, recurse: bool = True) -> None:
    """Whole parameters and buffers on every rank's device, out of the main rank's model; a collective. What is sharded already stays."""

    def whole(old: torch.Tensor) -> torch.Tensor:
        new = torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device)
        if ranks.world_size > 1:
            dist.broadcast(new, src=0)
        return new

    for owner, name, _ in places(module, recurse=recurse):
        if type(getattr(owner, name).data) is torch.Tensor:
            exchange.replace(owner, name, whole)


def empty_on(module: torch.nn.Module, exchange: Exchange, device: torch.device, *, recurse: bool = True) -> None:
    """Replace tensors on the meta device by ones of unknown value on a device."""
    for owner, name, _ in places(module, recurse=recurse):
        if getattr(owner, name).is_meta:
            exchange.replace(owner, name, lambda old: torch.empty_like(old, device=device))


def lower(module: torch.nn.Module, dtype: torch.dtype, *, recurse: bool = True) -> None:
    """Convert the parameters to a lower precision; buffers stay (rotary frequencies)."""
    for parameter in module.parameters(recurse=recurse):
        parameter.data = parameter.data.to(dtype)


def copy_buffers(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give a model the buffers of another of the same structure, those that no state dict has (rotary frequencies) too."""
    theirs = dict(source.named_buffers(remove_duplicate=False))
    for owner, name, path in places(target):
        if path in theirs:
            setattr(owner, name, theirs[path].detach().clone())


def places(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """(module, attribute, full name) of every parameter and buffer, tied ones at each place."""
    for prefix, owner in list(module.named_modules()) if recurse else [("", module)]:
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield owner, name, f"{prefix}.{name}" if prefix else name
