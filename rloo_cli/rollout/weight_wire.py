"""Weights as a few flat buffers, and back: what trainer and server agree on for one packed transfer.

A plan lists names, dtypes, shapes and where the buffers are cut; it travels as JSON before the bytes. A checksum for each buffer shows
that both sides cut and read the same. Imports torch alone; both sides use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

CHUNK_BYTES = 512 << 20
"""Largest buffer, unless a single tensor is larger: both sides hold one at a time beside the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent, in order.

    Example: `Plan(names=["a.weight"], dtypes=["float32"], shapes=[[2, 3]], counts=[1])`: one buffer with one tensor.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    counts: Sequence[int]
    """Tensors of each buffer."""

    def chunks(self) -> Iterator[list[tuple[str, torch.dtype, tuple[int, ...]]]]:
        """The tensors of each buffer."""
        start = 0
        for count in self.counts:
            part = slice(start, start + count)
            shapes = [tuple(shape) for shape in self.shapes[part]]
            yield list(zip(self.names[part], map(dtype_of, self.dtypes[part]), shapes, strict=True))
            start += count

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        return [sum(bytes_of(dtype, shape) for _, dtype, shape in chunk) for chunk in self.chunks()]

    def document(self) -> dict[str, Any]:
        """As JSON carries it."""
        return asdict(self)


def unique_tensors(
    named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> list[tuple[str, torch.Tensor, torch.dtype]]:
    """(name, tensor, dtype to send it in), widest elements first; of tied tensors the first name only.

    Floating-point tensors are sent in `dtype` (None = as they are): half the bytes where the server computes in bfloat16.
    """
    seen: set[tuple[Any, ...]] = set()
    found = []
    for name, tensor in named_tensors:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in seen or tensor.numel() == 0:
            seen.add(place)
            found.append((name, tensor.detach(), dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype))
    return sorted(found, key=lambda entry: -entry[2].itemsize)  # every tensor of a buffer then starts at a multiple of its element


def copied_tensors(
    named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> list[tuple[str, torch.Tensor, torch.dtype]]:
    """What `unique_tensors` gives, as copies on the CPU in the dtype to send: each tensor may be gone, and its memory another's, once the
    next is asked for. Of tied tensors that follow each other as the same object the first name only.
    """
    found = []
    before: torch.Tensor | None = None
    for name, tensor in named_tensors:
        if tensor is not before:
            sent = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            found.append((name, tensor.detach().to("cpu", sent, copy=True), sent))
        before = tensor
    return sorted(found, key=lambda entry: -entry[2].itemsize)


def make_plan(tensors: Sequence[tuple[str, torch.Tensor, torch.dtype]], chunk_bytes: int = CHUNK_BYTES) -> Plan:
    """The plan for these tensors, in this order."""
    counts: list[int] = []
    size = chunk_bytes + 1
    for _, tensor, dtype in tensors:
        need = tensor.numel() * dtype.itemsize
        if size + need > chunk_bytes:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += need
    return Plan(
        names=[name for name, _, _ in tensors],
        dtypes=[str(dtype).removeprefix("torch.") for _, _, dtype in tensors],
        shapes=[list(tensor.shape) for _, tensor, _ in tensors],
        counts=counts,
    )


def packed(tensors: Sequence[tuple[str, torch.Tensor, torch.dtype]], plan: Plan, device: torch.device) -> Iterator[torch.Tensor]:
    """Each buffer of the plan, uint8 on `device`, newly made: it may outlive the next one."""
    start = 0
    for count in plan.counts:
        part = tensors[start : start + count]
        with torch.no_grad():
            yield torch.cat([tensor.to(device, dtype).contiguous().view(-1).view(torch.uint8) for _, tensor, dtype in part])
        start += count


def unpacked(buffer: torch.Tensor, chunk: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of one buffer; the tensors are views of it."""
    sizes = [bytes_of(dtype, shape) for _, dtype, shape in chunk]
    parts = buffer.split(sizes)
    return [(name, part.view(dtype).view(shape)) for (name, dtype, shape), part in zip(chunk, parts, strict=True)]


def checksum(buffer: torch.Tensor) -> int:
    """The sum of a buffer's 64-bit words, modulo 2⁶⁴: fast, and different for a lost or a shifted part."""
    words = buffer.numel() // 8 * 8
    return int(buffer[:words].view(torch.int64).sum().item()) + int(buffer[words:].sum().item())


def bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as `bfloat16`.

    Raises:
        ValueError: torch has none of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r:.40}")
    return dtype
