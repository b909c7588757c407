"""A process that imports torch and says what it finds, as a line of JSON: `python -m rloo_cli.doctor.torch_child RANK PORT`.

Two of them meet by gloo, as the processes of a run do. Rank 0 looks at devices and measures bfloat16 too.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

MEETING_SECONDS = 8.0
LOOPBACK = "127.0.0.1"


def main(rank: int, port: int) -> None:
    """Print what this rank found."""
    import torch

    found: dict[str, Any] = {"rank": rank, "gloo": _meet(rank, port)}
    if rank == 0:
        found |= {"version": torch.__version__, "cuda": torch.version.cuda, **_devices(), **_bf16(), "nccl": _nccl()}
    print(json.dumps(found), flush=True)


def _meet(rank: int, port: int) -> str:
    """Empty where two processes summed a number; else why not."""
    import torch
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        return "this build of torch has no gloo"
    try:
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=MEETING_SECONDS)
        )
        total = torch.ones(1)
        distributed.all_reduce(total)
        distributed.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0][:300]
    return "" if total.item() == 2 else f"1 + 1 came to {total.item()}"


def _devices() -> Mapping[str, Any]:
    """GPUs with their memory in bytes; where there is a driver and CUDA does not start, the reason."""
    import torch

    error = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as problem:
            error = (str(problem).splitlines() or [type(problem).__name__])[0][:300]
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append({"name": properties.name, "total_bytes": total, "free_bytes": free, "capability": capability})
    return {"gpus": gpus, "cuda_error": error}


def _bf16() -> Mapping[str, Any]:
    """Whether a run would compute in bfloat16, as it decides itself; on a CPU with the measured times."""
    import torch

    from rloo_cli.training.bf16_speed import BF16_PAYS, product_seconds

    if torch.cuda.is_available():
        return {"bf16": torch.cuda.is_bf16_supported(including_emulation=False)}
    full, half = product_seconds()
    return {"bf16": full > BF16_PAYS * half, "bf16_speed": round(full / half, 2)}


def _nccl() -> str | None:
    import torch
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return None
    with contextlib.suppress(RuntimeError, AttributeError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return "of unknown version"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
