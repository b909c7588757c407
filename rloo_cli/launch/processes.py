"""Several processes on this machine that train together: started, led by signals, and ended, whatever happens to one of them.

Each gets the environment that torchrun gives. They are children of this process itself, without torchrun's agent between: it would end
them half a minute after a signal, while a checkpoint is written, and turn every exit code into 1.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rloo_cli.errors import RefusedError, StoppedError
from rloo_cli.launch.cluster import without_layout
from rloo_cli.launch.endings import Ending, error_of
from rloo_cli.launch.interface import LOOPBACK, network_variables
from rloo_cli.launch.job import dump_job
from rloo_cli.launch.local import held, new_job
from rloo_cli.launch.local_ranks import LocalRanks
from rloo_cli.launch.rank import LAUNCHER
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.plan.spread import crowding
from rloo_cli.recipe.processes import visible_gpus
from rloo_cli.run import atomic
from rloo_cli.run.environment import usable_cores
from rloo_cli.run.logs import logging_to
from rloo_cli.run.signals import StopSignal

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""From the end of one rank to that of the others, which end with it, at once or when they next hear of it; then they are killed."""
POLL_SECONDS = 0.1
JOB_FILE = "job.json"
"""In the attempt's folder: what the ranks are told."""


def train_in_processes(
    checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool, leave: Callable[[], None] | None = None
) -> None:
    """Train to the end in `target.folder`, which is locked meanwhile, in as many processes as the recipe says; `leave` is StopSignal's.

    Raises:
        RlooError: the first rank's that failed for a reason of its own; each rank's traceback is in its log.
    """
    count = checked.loaded.num_processes
    gpus = gpus_for(count)
    with (
        held(target) as (attempt, notes),
        logging_to(attempt / "launch.log", environment=os.environ),
        StopSignal(leave=leave, tells=False) as stop,
    ):
        notes = (*notes, f"{count} processes train together, {'a GPU each' if gpus else 'on the CPU'}", *crowding_told(count, gpus))
        job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
        logger.info("%s", shlex.join(job.command))
        file = attempt / JOB_FILE
        atomic.write_file(file, dump_job(job))
        with LocalRanks(attempt, file, environments(Spread.of_one_machine(count), os.environ, gpus=gpus)) as ranks:
            endings = _ended(ranks, stop)
        error = error_of(endings, attempt)
        logger.info("%s", error.message if error is not None else "done")
        if error is not None:
            raise error


def gpus_for(count: int) -> int:
    """The GPUs that can be seen here, 0 for training on the CPU.

    Raises:
        RefusedError: there are fewer than this many processes.
    """
    gpus = visible_gpus(os.environ)
    if 0 < gpus < count:
        raise RefusedError(f"run.num_processes: {count} processes on this machine need a GPU each, and {gpus} can be seen.")
    return gpus


def crowding_told(count: int, gpus: int) -> tuple[str, ...]:
    """A note where this machine's processes train on fewer cores than they are."""
    note = None if gpus else crowding(count, usable_cores())
    return () if note is None else (f"note: {note}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the processes of a run lie over machines, and where they meet."""

    local: int
    """Processes of this machine."""
    world: int
    """Of all machines."""
    machine_rank: int = 0
    host: str = LOOPBACK
    port: int
    has_store: bool = False
    """Whether a launcher has the store already in which the ranks meet; else rank 0 makes it."""
    interface: str | None = None
    """Of the network that they use; None = gloo and NCCL choose."""

    @classmethod
    def of_one_machine(cls, count: int) -> Spread:
        """All of them here, met on the loopback."""
        return cls(local=count, world=count, port=free_port(), interface="lo" if sys.platform == "linux" else None)


def environments(spread: Spread, environ: Mapping[str, str], *, gpus: int) -> list[dict[str, str]]:
    """The environment of each rank of this machine: torchrun's variables, a rendezvous, a network, and its share of the cores."""
    shared = {
        "WORLD_SIZE": str(spread.world),
        "LOCAL_WORLD_SIZE": str(spread.local),
        "GROUP_RANK": str(spread.machine_rank),
        "MASTER_ADDR": spread.host,
        "MASTER_PORT": str(spread.port),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // spread.local)),
        LAUNCHER: str(os.getpid()),
    }
    if spread.has_store:
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if not gpus:
        shared["ACCELERATE_USE_CPU"] = "true"
    network = network_variables(spread.interface) if spread.interface is not None else {}
    common = {**network, **without_layout(environ), **shared}
    first = spread.machine_rank * spread.local
    return [{**common, "RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(spread.local)]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _ended(ranks: LocalRanks, stop: StopSignal) -> list[Ending]:
    """How all of them ended, in that order. A signal of this process is theirs."""
    endings: list[Ending] = []
    deadline = float("inf")
    while ranks.running:
        if stop.received is not None:
            ranks.signal(stop.received)
        ended = ranks.collect()
        endings += ended
        if ended:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if any(ending.exit_code == StoppedError.exit_code for ending in ended):
            ranks.signal("SIGTERM")  # it may have heard the signal alone, and before there was a group to agree in
        if time.monotonic() > deadline and ranks.running:
            logger.warning("ranks %s did not end within %.0f s of the first, and are killed", ranks.running, GRACE_SECONDS)
            ranks.kill()
            endings += ranks.collect()
        time.sleep(POLL_SECONDS if ranks.running else 0)
    return endings
