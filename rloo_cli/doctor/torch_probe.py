"""torch, GPUs, bfloat16, NCCL and gloo, as two child processes find them: this process imports no torch, and waits no longer than it says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rloo_cli.doctor.check import Check, Level, judged
from rloo_cli.doctor.surroundings import RANKS
from rloo_cli.launch.interface import LOOPBACK, interface_of, network_variables
from rloo_cli.recipe.processes import visible_gpus

SECONDS = 40.0
"""From their start to the answer; a cold file system takes long to import torch, and an ordinary one three seconds."""
LATE = "no answer of a process that imports torch: a machine that is busy, a slow file system, or a driver that hangs"
LATE_REMEDY = 'try again when the machine has less to do; `python -X importtime -c "import torch"` tells where the time goes'
BROKEN_REMEDY = 'install it anew: pip install -c constraints.txt -e ".[math]"'
GIB = 1 << 30
BUSY_SHARE = 0.9
"""A GPU of which less is free has somebody on it."""


class TorchProbe:
    """The two processes, started at once so that other looks can be taken meanwhile."""

    def __init__(self, environ: Mapping[str, str], *, seconds: float = SECONDS) -> None:
        self._until = time.monotonic() + seconds
        self._environ = environ
        child = [sys.executable, "-m", "rloo_cli.doctor.torch_child"]
        kept = {name: value for name, value in environ.items() if name not in RANKS} | {"OMP_NUM_THREADS": "1"}
        if loopback := interface_of(LOOPBACK):  # as the processes of a run on one machine have it
            kept = network_variables(loopback) | kept
        port = _free_port()
        self._children = [
            subprocess.Popen(
                [*child, str(rank), str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, [_package_root(), environ.get("PYTHONPATH")]))},
            )
            for rank in (0, 1)
        ]

    def checks(self) -> Iterator[Check]:
        """What they found, once; both are gone afterwards."""
        try:
            first, second = (self._answer(child) for child in self._children)
        finally:
            for child in self._children:
                child.kill()
                child.wait()
        if isinstance(first, str):
            yield Check(name="torch", level=Level.FAIL, said=first, remedy=LATE_REMEDY if first == LATE else BROKEN_REMEDY)
            return
        yield from found_checks(first, second, gpus_there=visible_gpus(self._environ))

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any] | str:
        """What a child said, or why it said nothing."""
        try:
            said, errors = child.communicate(timeout=max(0.1, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return LATE
        try:
            document = json.loads((said.splitlines() or [""])[-1])
        except ValueError:
            last = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            return f"a process that imports torch failed: {last[:300]}"
        return document if isinstance(document, dict) else "a process that imports torch said nothing"


def found_checks(first: Mapping[str, Any], second: Mapping[str, Any] | str, *, gpus_there: int) -> Iterator[Check]:
    """The findings of both ranks as checks. `gpus_there`: NVIDIA devices that this process may see, whatever torch makes of them."""
    cuda, gpus = first["cuda"], first["gpus"]
    build = f"{first['version']}, {'built for CUDA ' + cuda if cuda else 'a build for CPUs'}"
    unusable = gpus_there > 0 and not gpus
    reason = first["cuda_error"] or ("this build of torch has no CUDA" if cuda is None else "CUDA finds no device")
    remedy = (
        "install torch's build for your driver's CUDA (pytorch.org gives the command)"
        if cuda is None
        else "update the NVIDIA driver, or take a build of torch for its CUDA; nvidia-smi tells its version"
    )
    yield judged(
        "torch",
        f"{build}; {gpus_there} GPUs are here, and cannot be used: {reason}" if unusable else build,
        remedy=remedy,
        fails=unusable,
        version=first["version"],
        cuda=cuda,
    )
    yield _gpu_check(gpus)
    yield _bf16_check(first, has_gpu=bool(gpus))
    nccl = first["nccl"]
    yield judged(
        "nccl",
        f"NCCL {nccl}" if nccl else "no NCCL" + ("" if gpus else ", which a CPU does without"),
        remedy="install torch's build for CUDA: several GPUs talk by NCCL",
        fails=nccl is None and len(gpus) > 1,
        version=nccl,
    )
    wrong = first["gloo"] or (second if isinstance(second, str) else second["gloo"])
    yield judged(
        "gloo",
        f"two processes do not meet: {wrong}" if wrong else "two processes met on the loopback and summed a number",
        remedy="several processes cannot train together here: look at GLOO_SOCKET_IFNAME, the firewall of the loopback, proxies of the sandbox",
        warns=bool(wrong),
    )


def _gpu_check(gpus: list[dict[str, Any]]) -> Check:
    busy = [index for index, gpu in enumerate(gpus) if gpu["free_bytes"] < BUSY_SHARE * gpu["total_bytes"]]
    words = [
        f"{index}: {gpu['name']}, {gpu['free_bytes'] / GIB:.0f} of {gpu['total_bytes'] / GIB:.0f} GiB free"
        for index, gpu in enumerate(gpus)
    ]
    return judged(
        "gpus",
        "; ".join(words) or "none: a run trains on the CPU",
        remedy=f"somebody uses GPU {', '.join(map(str, busy))} (nvidia-smi tells who): CUDA_VISIBLE_DEVICES chooses others",
        warns=bool(busy),
        gpus=gpus,
    )


def _bf16_check(first: Mapping[str, Any], *, has_gpu: bool) -> Check:
    is_fast = first["bf16"]
    measured = f": {first['bf16_speed']:g} times as fast as float32" if "bf16_speed" in first else ""
    said = f"{'fast' if is_fast else 'not fast'} here{measured}, so that `bf16: true` computes in {'bfloat16' if is_fast else 'float32'}"
    remedy = "GPUs from Ampere on (A100, RTX 30) compute in bfloat16"
    return judged("bf16", said, remedy=remedy, warns=has_gpu and not is_fast, bf16=is_fast, speed=first.get("bf16_speed"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _package_root() -> str:
    import rloo_cli

    return os.path.dirname(os.path.dirname(os.path.abspath(rloo_cli.__file__)))  # noqa: PTH100, PTH120
