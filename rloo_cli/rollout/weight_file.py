"""Weights for a vLLM server by a safetensors file in a folder that both sides see."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from rloo_cli.errors import EngineError, StorageError
from rloo_cli.rollout.server_client import ServerClient
from rloo_cli.rollout.weight_transfer import Tensors, update_seconds
from rloo_cli.rollout.weight_wire import Plan, checksum, make_plan, packed

FORMAT_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 64  # of the data in the file


class FileTransfer:
    """A safetensors file in a folder, which the server reads; it goes when the server uses the next one."""

    name = "file"

    def __init__(self, folder: Path, *, owner: str) -> None:
        self._folder = folder.absolute()
        # The run folder tells whose files they are, also after the trainer was killed and started again.
        self._prefix = f"weights-{hashlib.sha256(owner.rpartition(':')[2].encode()).hexdigest()[:8]}-"
        self._newest: Path | None = None

    async def join(self, client: ServerClient, world_size: int) -> None:
        """Tell the workers that files will come."""
        await client.call("POST", "/init_weight_transfer_engine", {"init_info": {"transport": "file"}})

    async def send(self, client: ServerClient, tensors: Tensors) -> None:
        """Write the file, and have the server load it."""
        plan = make_plan(tensors)
        self._newest = self._folder / f"{self._prefix}{secrets.token_hex(4)}.safetensors"
        sums = write_weights(self._newest, tensors, plan)
        info = {"plan": plan.document(), "path": str(self._newest), "checksums": sums}
        await client.call("POST", "/update_weights", {"update_info": info}, seconds=update_seconds(plan))

    def sent(self) -> None:
        """Remove older files."""
        self._remove(keep=self._newest)

    def close(self) -> None:
        """Remove all files of this run."""
        self._remove(keep=None)

    def _remove(self, keep: Path | None) -> None:
        for path in [*self._folder.glob(f"{self._prefix}*"), *self._folder.glob(f".tmp-{self._prefix}*")]:
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()


def write_weights(path: Path, tensors: Tensors, plan: Plan) -> list[int]:
    """The checksum of each buffer of a safetensors file that was written, and appeared whole.

    Raises:
        StorageError: it could not be written.
    """
    header: dict[str, Any] = {}
    offset = 0
    for chunk in plan.chunks():
        for name, dtype, shape in chunk:
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _format_dtype(name, dtype), "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    temporary = path.with_name(f".tmp-{path.name}")
    sums = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for buffer in packed(tensors, plan, torch.device("cpu")):
                sums.append(checksum(buffer))
                file.write(memoryview(buffer.numpy()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"cannot write weights for the vLLM server to {path.parent}: {error.strerror}; see vllm_weight_transfer_dir"
        ) from error
    return sums


def _format_dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in FORMAT_DTYPES:
        raise EngineError(f"the weight {name} has dtype {dtype}, which `vllm_weight_transfer: file` does not send")
    return FORMAT_DTYPES[dtype]
