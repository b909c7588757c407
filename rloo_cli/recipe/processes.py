"""How many processes train: as asked for, or one for each GPU that this process may see. CUDA is not started for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

DEVICES = Path("/dev")


def visible_gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> int:
    """NVIDIA GPUs of this machine or container, or as many of them as CUDA_VISIBLE_DEVICES names."""
    there = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not there:
        return there
    wanted = [name.strip() for name in named.split(",")]
    return next((i for i, name in enumerate(wanted) if name in ("", "-1")), len(wanted))  # CUDA sees none of those after it


def process_count(asked: int | Literal["auto"], environ: Mapping[str, str], *, filed: int | None = None, num_machines: int = 1) -> int:
    """Processes that train, those of all machines.

    Args:
        asked: by the recipe or the command line; `auto` is what a file of the user's says (`filed`), else one for each visible GPU, and one
            on a CPU.
        environ: may hide GPUs.
        filed: by a file of `accelerate config`.
        num_machines: that each have as many as this one.
    """
    if asked != "auto":
        return asked
    return filed or num_machines * max(1, visible_gpus(environ))
