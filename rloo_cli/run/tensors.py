"""Tensors as safetensors bytes, one tensor in memory at a time, and back.

safetensors' own `save_file` writes mode 0600 and replaces links, and `save` builds the whole file in memory; the format is
a length, a JSON header and raw data, so this writes it as a stream that is hashed and written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.errors import StorageError

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

HEADER_ALIGNMENT = 8


def safetensors_stream(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size in bytes of the safetensors file, and its bytes as a stream.

    Tensors may lie on any device and need not be contiguous; those that share memory are written each on its own.
    """
    # Widest elements first, as safetensors itself does: every tensor then starts at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return len(head) + offset, _stream(head, [tensor for _, tensor in ordered])


def load_safetensors(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        StorageError: it is not one, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
    except KeyError:
        raise TypeError(f"tensor {name}: {tensor.dtype} has no name in the safetensors format") from None


def _stream(head: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    import torch

    yield head
    for tensor in tensors:
        yield memoryview(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())
