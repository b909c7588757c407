"""Several processes on this machine that train together: started, led by signals, and ended, whatever happens to one of them.

Each gets the environment that torchrun gives. They are children of this process itself, without torchrun's agent between: it would end
them half a minute after a signal, while a checkpoint is written, and turn every exit code into 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from rloo_cli.errors import RefusedError, StoppedError
from rloo_cli.launch.endings import Ending, error_of
from rloo_cli.launch.job import Job, dump_job
from rloo_cli.launch.joining import refuse_sharded
from rloo_cli.launch.local import held, new_job
from rloo_cli.launch.rank import BOOT, LAUNCHER
from rloo_cli.launch.record import log_name
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.recipe.processes import visible_gpus
from rloo_cli.run import atomic
from rloo_cli.run.environment import usable_cores
from rloo_cli.run.logs import logging_to, read_rank_reports
from rloo_cli.run.signals import STOP_SIGNALS, StopSignal

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""From the end of one rank to that of the others, which end with it, at once or when they next hear of it; then they are killed."""
POLL_SECONDS = 0.1
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
LOOPBACK = "127.0.0.1"


def train_in_processes(checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool) -> None:
    """Train to the end in `target.folder`, which is locked meanwhile, in as many processes as the recipe says.

    Raises:
        RlooError: the first rank's that failed for a reason of its own; each rank's traceback is in its log.
    """
    count = checked.loaded.num_processes
    gpus = visible_gpus(os.environ)
    refuse_sharded(os.environ)
    if 0 < gpus < count:
        raise RefusedError(f"run.num_processes: {count} processes need a GPU each, and {gpus} can be seen.")
    with held(target) as (attempt, notes), logging_to(attempt / "launch.log", environment=os.environ), StopSignal() as stop:
        notes = (*notes, f"{count} processes train together, {'a GPU each' if gpus else 'on the CPU'}")
        job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
        logger.info("%s", shlex.join(job.command))
        with _Ranks(job, environments(count, os.environ, gpus=gpus)) as ranks:
            endings = ranks.wait(stop)
        error = error_of(endings, attempt)
        logger.info("%s", error.message if error is not None else "done")
        if error is not None:
            raise error


def environments(count: int, environ: Mapping[str, str], *, gpus: int) -> list[dict[str, str]]:
    """The environment of each rank: torchrun's variables, a rendezvous on the loopback, and its share of the cores."""
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count)),
        LAUNCHER: str(os.getpid()),
    }
    if not gpus:
        shared["ACCELERATE_USE_CPU"] = "true"
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", "lo")
    return [{**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


class _Ranks:
    """The processes of one job. None of them is left when the block ends."""

    def __init__(self, job: Job, environments: list[dict[str, str]]) -> None:
        self._job = job
        self._file = job.attempt / "job.json"
        self._environments = environments
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._endings: list[Ending] = []
        self._forwarded = False
        self._is_killed = False

    def __enter__(self) -> _Ranks:
        atomic.write_file(self._file, dump_job(self._job))
        with contextlib.ExitStack() as undo:
            undo.callback(self._kill)
            for rank, environment in enumerate(self._environments):
                self._running[rank] = _start(self._job, self._file, rank, environment)
            undo.pop_all()
        logger.info("ranks: %s", {rank: process.pid for rank, process in self._running.items()})
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    def wait(self, stop: StopSignal) -> list[Ending]:
        """How all of them ended, in that order. A signal of this process is theirs."""
        deadline = float("inf")
        while self._running:
            if stop.received is not None:
                self._forward(stop.received)
            ended = self._collect()
            if ended and deadline == float("inf"):
                deadline = time.monotonic() + GRACE_SECONDS
            if any(ending.exit_code == StoppedError.exit_code for ending in ended):
                self._forward("SIGTERM")  # it may have heard the signal alone, and before there was a group to agree in
            if time.monotonic() > deadline and self._running:
                logger.warning("ranks %s did not end within %.0f s of the first, and are killed", sorted(self._running), GRACE_SECONDS)
                self._kill()
                self._collect()
            time.sleep(POLL_SECONDS if self._running else 0)
        return self._endings

    def _collect(self) -> list[Ending]:
        """The ranks that have ended since the last time, the dead without a word first."""
        done = {rank: process.returncode for rank, process in self._running.items() if process.poll() is not None}
        if not done:
            return []
        reports = {report.rank: report for report in read_rank_reports(self._job.attempt)}
        endings = [Ending(rank=rank, returncode=code, was_killed=self._is_killed, report=reports.get(rank)) for rank, code in done.items()]
        for ending in endings:
            del self._running[ending.rank]
            logger.info("rank %d ended: %d%s", ending.rank, ending.returncode, f", {ending.report.reason}" if ending.report else "")
        self._endings += endings
        return endings

    def _forward(self, signal_name: str) -> None:
        if self._forwarded:
            return
        self._forwarded = True
        logger.info("%s: passed on to ranks %s", signal_name, sorted(self._running))
        for process in self._running.values():
            process.send_signal(signal.Signals[signal_name])

    def _kill(self) -> None:
        """End what still runs, with all that came of it."""
        self._is_killed = True
        for process in self._running.values():
            family = _family(process.pid)
            process.kill()
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        for process in self._running.values():
            process.wait()


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _start(job: Job, file: Path, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A rank's process in a session of its own, so that a terminal's Ctrl-C reaches it by way of the launcher alone."""
    command = [sys.executable, "-P", "-c", BOOT, str(file), PACKAGE_ROOT]
    with _output(job, rank) as (out, err), _signals_held_back():
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Blocks stop signals for the block; a process that is started in it goes on blocking them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextlib.contextmanager
def _output(job: Job, rank: int) -> Iterator[tuple[int | None, int]]:
    """(standard output, standard error) of a rank: the main one shows what happens; what libraries print goes to the logs."""
    log = os.open(job.attempt / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        yield (None if rank == 0 else log), log
    finally:
        os.close(log)
