"""The processes of one machine that train: started with a job, signalled, collected as they end, and killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rloo_cli.errors import StorageError
from rloo_cli.launch.endings import Ending, death
from rloo_cli.launch.rank import BOOT
from rloo_cli.launch.record import log_name
from rloo_cli.run.logs import RankReport, read_rank_reports, write_rank_report
from rloo_cli.run.signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class LocalRanks:
    """This machine's processes of one job. None of them is left when the block ends.

    Args:
        attempt: the log folder; what `dump_job` gave lies in it.
        file: that job.
        environments: one for each process, with its RANK.
        folder: in which they work; None = this process' own.
    """

    def __init__(self, attempt: Path, file: Path, environments: Sequence[Mapping[str, str]], *, folder: Path | None = None) -> None:
        self._attempt = attempt
        self._file = file
        self._environments = environments
        self._folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._is_signalled = False
        self._is_killed = False

    def __enter__(self) -> LocalRanks:
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            for environment in self._environments:
                rank = int(environment["RANK"])
                self._running[rank] = self._start(rank, environment)
            undo.pop_all()
        logger.info("ranks: %s", {rank: process.pid for rank, process in self._running.items()})
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A rank's process in a session of its own, so that a terminal's Ctrl-C reaches it by way of the launcher alone."""
        command = [sys.executable, "-P", "-c", BOOT, str(self._file), PACKAGE_ROOT]
        with _output(self._attempt, rank) as (out, err), _signals_held_back():
            return subprocess.Popen(
                command, cwd=self._folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def running(self) -> list[int]:
        """Ranks whose end has not been collected."""
        return sorted(self._running)

    def collect(self) -> list[Ending]:
        """The ranks that have ended since the last time."""
        done = {rank: process.returncode for rank, process in self._running.items() if process.poll() is not None}
        if not done:
            return []
        reports = {report.rank: report for report in read_rank_reports(self._attempt)}
        endings = [Ending(rank=rank, returncode=code, was_killed=self._is_killed, report=reports.get(rank)) for rank, code in done.items()]
        for ending in endings:
            del self._running[ending.rank]
            logger.info("rank %d ended: %d%s", ending.rank, ending.returncode, f", {ending.report.reason}" if ending.report else "")
            if ending.report is None and not ending.was_killed:
                self._tell_for(ending)
        return endings

    def _tell_for(self, ending: Ending) -> None:
        """Leave `rank-K.json` in the place of a rank that died without a word."""
        reason = f"rank {ending.rank} on {ending.host} {death(ending.returncode)} without a word"
        try:
            write_rank_report(self._attempt, RankReport(rank=ending.rank, exit_code=ending.returncode, reason=reason, silent=True))
        except StorageError as error:
            logger.warning("%s", error.message)

    def signal(self, name: str) -> None:
        """Pass a signal on, the first that there is; they agree on what it means."""
        if self._is_signalled:
            return
        self._is_signalled = True
        logger.info("%s: passed on to ranks %s", name, self.running)
        for process in self._running.values():
            process.send_signal(signal.Signals[name])
            process.send_signal(signal.SIGCONT)  # one that was stopped (SIGSTOP) hears nothing, and the others would wait for it

    def kill(self) -> None:
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


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Blocks stop signals for the block; a process that is started in it goes on blocking them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@contextlib.contextmanager
def _output(attempt: Path, rank: int) -> Iterator[tuple[int | None, int]]:
    """(standard output, standard error) of a rank: the main one shows what happens; what libraries print goes to the logs."""
    log = os.open(attempt / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        yield (None if rank == 0 else log), log
    finally:
        os.close(log)
