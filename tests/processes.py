"""Functions run in several processes that are joined by gloo, as the ranks of a run are."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

SECONDS = 240
"""For all ranks to end: minutes on a machine with much else to do, and below the limit of a test."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(work: Any, world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each rank, in order; the traceback of the first rank that failed is the assertion's.

    `work` is a function of a module (processes are spawned). Each rank has one thread and the environment that a launcher would give.
    """
    port = free_port()
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(work, rank, world_size, port, str(folder), list(sys.path), arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    failures = [path.read_text() for path in sorted(Path(folder).glob("failed-*"))]
    assert not failures, failures[0]
    assert not stuck, f"ranks {stuck} still ran after {SECONDS} s"
    return [torch.load(Path(folder) / f"result-{rank}", weights_only=True) for rank in range(world_size)]


def _rank(work: Any, rank: int, world_size: int, port: int, folder: str, path: list[str], arguments: tuple[Any, ...]) -> None:
    sys.path[:] = path
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    try:
        result = work(rank, *arguments)
    except BaseException:
        (Path(folder) / f"failed-{rank}").write_text(traceback.format_exc())
        raise
    torch.save(result, Path(folder) / f"result-{rank}")
