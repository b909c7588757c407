"""Where a run is planned for: GPUs by name, or what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rloo_cli.errors import RefusedError
from rloo_cli.plan.numbers import GIB

GPUS_OF_A_MACHINE = 8
"""What a machine of named GPUs is taken to have where nothing says how many machines there are."""
GPUS = {
    "rtx4090-24": 23.5,
    "l4-24": 22.0,
    "a10-24": 22.0,
    "rtx5090-32": 31.3,
    "a100-40": 39.4,
    "l40s-48": 44.4,
    "rtx6000ada-48": 47.4,
    "a100-80": 79.2,
    "h100-80": 79.2,
    "h100-94": 93.1,
    "gh200-96": 94.5,
    "h200-141": 139.8,
    "b200-192": 178.4,
}
"""GiB that CUDA reports of each, which is less than the name says; rounded down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device of the planned run and its memory, in bytes."""

    name: str
    kind: Literal["cuda", "cpu"]
    total: int
    """Of a GPU; on a CPU that of the machine, which its processes share."""
    free: int
    """What nothing holds now; of a named GPU all of it."""
    is_named: bool = False
    """Whether it was named, and need not be here."""

    def room(self, processes: int) -> int:
        """Bytes for each of the `processes` of one machine."""
        return self.free if self.kind == "cuda" else self.free // processes


def machines_of_gpus(processes: int) -> int:
    """The fewest machines of at most eight GPUs that share so many processes evenly."""
    return next(count for count in range(1, processes + 1) if processes % count == 0 and processes // count <= GPUS_OF_A_MACHINE)


def check_gpu(gpu: str | None) -> None:
    """Raise RefusedError where no GPU of that name is known."""
    if gpu is not None and gpu.lower() not in GPUS:
        raise RefusedError(f"--gpu {gpu}: not known. There are {', '.join(GPUS)}.")


def find_device(gpu: str | None) -> DeviceMemory:
    """The GPU of that name, which is known; None = this machine's, or its CPU."""
    if gpu is None:
        return _this_machines()
    size = round(GPUS[gpu.lower()] * GIB)
    return DeviceMemory(name=gpu.lower(), kind="cuda", total=size, free=size, is_named=True)


def _this_machines() -> DeviceMemory:
    import psutil
    import torch

    if not torch.cuda.is_available():
        memory = psutil.virtual_memory()
        return DeviceMemory(name="this machine", kind="cpu", total=int(memory.total), free=int(memory.available))
    free, total = torch.cuda.mem_get_info(0)
    return DeviceMemory(name=torch.cuda.get_device_name(0), kind="cuda", total=int(total), free=int(free))
