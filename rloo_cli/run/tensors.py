"""Tensors as safetensors bytes, one tensor in memory at a time, and back, any range of one without the rest.

safetensors' own `save_file` writes mode 0600 and replaces links, and `save` builds the whole file in memory; the format is
a length, a JSON header and raw data, so this writes it as a stream that is hashed and written once. Its slices are rows of a mapped
file; a range of a flattened tensor is read from its place instead, and what was read does not stay mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import StorageError
from rloo_cli.run.disk_errors import storage_errors
from rloo_cli.run.manifest import DamagedError

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
}
"""torch's dtype names and those of the format."""
DTYPES = {code: name for name, code in DTYPE_NAMES.items()}

HEADER_ALIGNMENT = 8
LENGTH_BYTES = 8
"""Of the header's length, at the beginning of a file."""
LARGEST_HEADER = 100_000_000
"""Bytes; what safetensors itself takes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the beginning of the file."""


class TensorsFile:
    """A safetensors file's header; the tensors are read when they are asked for.

    Raises:
        DamagedError: it is no safetensors file, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header, begin, size = _read_header(path)
            self.metadata: Mapping[str, str] = header.pop("__metadata__", {})
            self.places = {name: _place(entry, begin, size) for name, entry in header.items()}
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(path, "not a safetensors file (cut off or damaged)") from error

    def read_into(self, target: torch.Tensor, place: Place, start: int) -> None:
        """Fill `target`, 1-D on the CPU, with the elements of a tensor from `start` on, the tensor flattened.

        Raises:
            StorageError: it cannot be read.
        """
        import torch

        view = memoryview(target.view(torch.uint8).numpy())
        with storage_errors("read", self.path), self.path.open("rb", buffering=0) as file:
            file.seek(place.offset + start * place.dtype.itemsize)
            while view:
                if not (count := file.readinto(view)):
                    raise StorageError(f"cannot read {self.path}: it ends too early.")
                view = view[count:]


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where the data begins, size of the file), the latter two in bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > min(LARGEST_HEADER, size - LENGTH_BYTES):
            raise ValueError(length)
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError(type(header))
    return header, LENGTH_BYTES + length, size


def _place(entry: Mapping[str, Any], begin: int, size: int) -> Place:
    import torch

    dtype, shape = getattr(torch, DTYPES[entry["dtype"]]), tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if last - first != math.prod(shape) * dtype.itemsize or not 0 <= begin + first <= begin + last <= size:
        raise ValueError(entry)
    return Place(dtype=dtype, shape=shape, offset=begin + first)


def safetensors_stream(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size in bytes of the safetensors file, and its bytes as a stream.

    Tensors may lie on any device and need not be contiguous; those that share memory are written each on its own.
    """
    # Widest elements first, as safetensors itself does: every tensor then starts at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    head, size = safetensors_head(ordered, metadata)
    return len(head) + size, _stream(head, list(ordered.values()))


def safetensors_head(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """(what a safetensors file begins with, bytes of the tensors that have to follow in their order); tensors without data will do."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, offset


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's data as a file has it, whatever device it is on."""
    import torch

    return memoryview(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
    except KeyError:
        raise TypeError(f"tensor {name}: {tensor.dtype} has no name in the safetensors format") from None


def _stream(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        yield tensor_bytes(tensor)
