"""The server's side of a weight transfer, in each of vLLM's workers: one backend of ours, with the ways that a trainer may choose from.

vLLM's own `nccl` backend takes weights by NCCL alone and needs vLLM in the trainer too; this one takes them over torch.distributed's
process groups (NCCL, gloo) or from a file, without. Loading them is vLLM's. `rollout/weight_transfer.py` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rloo_cli.rollout.weight_group import GroupPlace, from_trainer, join_store, make_group
from rloo_cli.rollout.weight_wire import Plan, checksum, unpacked

BACKEND = "rloo"
"""For `--weight-transfer-config '{"backend": "rloo"}'`."""
HEADER_LENGTH_BYTES = 8  # of a safetensors file


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights will come."""

    transport: str
    """nccl, gloo, or file."""
    host: str = ""
    port: int = 0
    prefix: str = ""
    world_size: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What comes now."""

    plan: dict[str, Any]
    path: str | None = None
    """Of a safetensors file; None = by broadcast."""
    checksums: list[int] | None = None
    """Of each buffer in the file; those of a broadcast follow their buffer."""


class RlooTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes weights from a trainer and has vLLM load them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _group: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainer; a group that was there before is dropped."""
        self._group = None
        if init_info.transport == "file":
            return
        if init_info.transport not in ("gloo", "nccl"):
            raise ValueError(f"no weight transfer by {init_info.transport!r:.40}")
        place = GroupPlace(
            transport=init_info.transport,
            host=init_info.host,
            port=init_info.port,
            prefix=init_info.prefix,
            world_size=init_info.world_size,
        )
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receive_device = torch.device("cpu") if place.transport == "gloo" else self.device
        self._group = make_group(place, join_store(place), rank=rank, device=self._receive_device)

    def start_weight_update(self) -> None:
        """Let vLLM take checkpoint tensors layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        drop_open_update(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Let vLLM finish its layers, and mend what it leaves behind on CPUs."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            mend_tied_head(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load; vLLM's own then synchronises an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take every buffer, check it, and load its tensors."""
        plan = Plan(**update_info.plan)
        buffers = self._from_trainer(plan) if update_info.path is None else _from_file(Path(update_info.path), plan, update_info.checksums)
        for chunk, (buffer, expected) in zip(plan.chunks(), buffers, strict=True):
            if checksum(buffer) != expected:
                raise RuntimeError("weights arrived damaged: another checksum than the trainer's")
            # vLLM may hold these views until their layer is complete; each buffer is its own.
            self.model.load_weights(unpacked(buffer, chunk))

    def _from_trainer(self, plan: Plan) -> Iterator[tuple[torch.Tensor, int]]:
        """(buffer, checksum) of each broadcast."""
        if self._group is None:
            raise RuntimeError("no trainer has joined since this server started")
        for size in plan.sizes:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._receive_device)
            total = torch.zeros(1, dtype=torch.int64, device=self._receive_device)
            self._group.broadcast([buffer], from_trainer()).wait()
            self._group.broadcast([total], from_trainer()).wait()
            yield buffer, int(total.item())

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._group = None


def _from_file(path: Path, plan: Plan, checksums: list[int] | None) -> Iterator[tuple[torch.Tensor, int]]:
    """(buffer, checksum) of each part of a safetensors file."""
    if path.suffix != ".safetensors" or checksums is None or len(checksums) != len(plan.sizes):
        raise ValueError("no weights file with a checksum for each of its buffers")
    if not path.is_file():
        raise FileNotFoundError(f"the server does not see {path}: trainer and server need one folder (vllm_weight_transfer_dir)")
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little") + HEADER_LENGTH_BYTES)
        for size, expected in zip(plan.sizes, checksums, strict=True):
            buffer = torch.empty(size, dtype=torch.uint8)
            if file.readinto(memoryview(buffer.numpy())) != size:
                raise RuntimeError(f"{path} is too short")
            yield buffer, expected


def drop_open_update(model: torch.nn.Module) -> None:
    """Forget tensors that an update which failed left waiting in layers: vLLM would load them with those of the next."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def mend_tied_head(model: torch.nn.Module) -> None:
    """Point a CPU model's LM head at its new weight: vLLM's CPU build keeps a function of the old one."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if isinstance(getattr(head, "weight", None), torch.Tensor):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def register() -> None:
    """Make the backend known to vLLM in this process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RlooTransferEngine)
