"""One attempt of a SLURM job, as its batch script ends: steps started, watched, stopped; and whether another attempt is to go on.

What SLURM does to a job is in docs/slurm.md. What follows from it here: an srun passes USR1 on to its tasks, but at TERM it has them
killed, so USR1 alone asks a step to end; srun's exit code is not that of the task that failed first, so each task leaves its own; and an
srun whose node's slurmstepd is gone waits for ever, so what the tasks have left counts, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rloo_cli.errors import EngineError, LostRankError, RefusedError, StoppedError
from rloo_cli.launch import slurm_job
from rloo_cli.launch.endings import BUG
from rloo_cli.launch.slurm_records import TaskRecord, Verdict, judge, next_progress, read_records
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import list_steps
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import read_rank_reports
from rloo_cli.run.signals import StopSignal
from rloo_cli.serving.address import Address, parse_address
from rloo_cli.serving.key import find_key, read_key
from rloo_cli.serving.probe import Readiness, one_token

POLL_SECONDS = 0.5
REST_SECONDS = 120.0
"""From the first task that failed, or from that of rank 0, to the end of the others, which end with it within a minute."""
LATE_SECONDS = 30.0
"""For srun to end when all of its tasks have, for a step to end when it was killed, and for the last records to come over a network file
system."""
END_SECONDS = 60.0
"""For the server to end when it was asked to."""
HURRY_SECONDS = 4.0
"""For each of these three, where a signal has told of an end that SLURM will not put off."""
TOLD_SECONDS = 60.0
"""Between two lines that say what is waited for."""
SAVED_SHARE = 0.9
"""Of the time between the signal and the limit: what has not been saved by then is given up, so that the job is requeued, not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The step that serves."""

    command: tuple[str, ...]
    url: str
    """Where the training's first node reaches it."""
    key: Path
    """Where its key goes."""
    seconds: float
    """For its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What the batch script says."""

    run: Path
    logs: Path
    """The attempt's folder; the job's is above it."""
    training: tuple[str, ...]
    """The srun of the training."""
    tasks: int
    """Of the training, one a node."""
    server: Server | None
    signal_seconds: float
    """Between USR1 and the time limit."""
    max_requeues: int
    """In a row, without a new checkpoint."""


class Step:
    """An srun in the background; `code` is None while it runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def code(self) -> int | None:
        """What srun ended with."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Send USR1 to every task, at which `rloo` saves what there is to save, and leaves."""
        self._process.send_signal(signal.SIGUSR1)

    def wait(self, seconds: float) -> bool:
        """Whether the step has ended, at the latest after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.code is not None

    def kill(self, *, seconds: float) -> None:
        """Return when the step has ended: its tasks are killed, and after some seconds srun."""
        self._process.terminate()
        if not self.wait(seconds):
            self._process.kill()
            self._process.wait()


def run_attempt(attempt: Attempt, job: slurm_job.SlurmJob, say: Callable[[str], None]) -> int:
    """The exit code of the job, where it is not requeued.

    Raises:
        LostRankError: too many attempts before this one came to nothing.
        RlooError: what the folders need cannot be written.
    """
    progress = next_progress(attempt.logs.parent / "progress.json", step=_newest_step(attempt.run))
    where = f"from step {progress.step}" if progress.step >= 0 else "from the start"
    say(f"attempt {attempt.logs.name.removeprefix('attempt-')} of job {job.id}, {where}; logs: {attempt.logs}")
    if progress.fruitless > attempt.max_requeues:
        raise LostRankError(
            f"{progress.fruitless} attempts in a row ended without a new checkpoint ({where}): not tried again. "
            f"The logs are in {attempt.logs.parent} and {attempt.run}/logs."
        )

    def is_requeued(verdict: Verdict) -> bool:
        say(f"{verdict.reason}: exit code {verdict.exit_code}")
        if not verdict.goes_on:
            return False
        if _newest_step(attempt.run) <= progress.step and progress.fruitless == attempt.max_requeues:
            say(f"not requeued: {progress.fruitless + 1} attempts in a row ended without a new checkpoint")
            return False
        return job.requeue(say)

    with StopSignal() as stop:
        verdict, ends_soon = _Watch(attempt, job, stop, say).outcome(is_requeued)
    if ends_soon:
        job.wait_for_end()
    return verdict.exit_code


def _has_bug(folder: RunFolder, *, since: int) -> bool:
    """Whether a process of the attempts after the `since`-th ended with an error that is none of ours."""
    attempts = range(since + 1, folder.attempts() + 1)
    reports = [report for number in attempts for report in read_rank_reports(folder.attempt(number))]
    return any(report.exit_code == BUG and not report.neighbour and not report.silent for report in reports)


def _newest_step(run: Path) -> int:
    return max(list_steps(RunFolder(run).checkpoints), default=-1)


class _Watch:
    """The steps of an attempt, from the first one's start to the last one's end."""

    def __init__(self, attempt: Attempt, job: slurm_job.SlurmJob, stop: StopSignal, say: Callable[[str], None]) -> None:
        self._attempt = attempt
        self._job = job
        self._stop = stop
        self._say = say
        self._told = time.monotonic()
        self._began = RunFolder(attempt.run).attempts()

    def outcome(self, is_requeued: Callable[[Verdict], bool]) -> tuple[Verdict, bool]:
        """The verdict, and what `is_requeued` answered to it. None of the steps runs afterwards."""
        asked = self._attempt.server
        if asked is None:
            verdict = self._train(None)
            return verdict, is_requeued(verdict)
        with _key(asked) as (address, key), _step(asked.command) as server:
            self._say(f"server: {asked.url}, log: {self._attempt.logs / 'server.log'}")
            verdict = self._before_ready(asked, server, address, key) or self._train(server)
            atomic.remove_file(asked.key)  # first, since SLURM ends this process when the job is requeued
            server.ask_to_end()
            server.wait(END_SECONDS if self._stop.received is None else HURRY_SECONDS)
            return verdict, is_requeued(verdict)

    def _before_ready(self, asked: Server, server: Step, address: Address, key: str) -> Verdict | None:
        """None when the server generates; the verdict where that does not come to pass."""
        log, started = self._attempt.logs / "server.log", time.monotonic()
        readiness = Readiness(lambda: one_token(address, key))
        try:
            while not readiness.ready.wait(POLL_SECONDS):
                waited = time.monotonic() - started
                if self._stop.received is not None:
                    reason = f"{self._stop.received} while the server started"
                    return Verdict(exit_code=StoppedError.exit_code, reason=reason, goes_on=not self._is_unwanted())
                if server.code is not None:
                    code = server.code if server.code > 0 else EngineError.exit_code
                    return Verdict(exit_code=code, reason=f"the server ended before it was ready ({log})")
                if waited > asked.seconds:
                    reason = f"the server does not generate after {waited:.0f} s: {readiness.answer} ({log})"
                    return Verdict(exit_code=EngineError.exit_code, reason=reason)
                self._tell(f"waiting for the server for {waited:.0f} s: {readiness.answer}")
        finally:
            readiness.stop()
        self._say("server: ready")
        return None

    def _train(self, server: Step | None) -> Verdict:
        with _step(self._attempt.training) as training:
            self._say(f"training: {self._attempt.tasks} tasks")
            server_code = self._wait(training, server)
        return self._judge(self._last_records(), server_code)

    def _wait(self, training: Step, server: Step | None) -> int | None:
        """Return when the training's srun has ended or there is no more to wait for: the code of a server that ended by itself before."""
        server_code, deadline, is_asked = None, float("inf"), False
        while training.code is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if server is not None and server_code is None and server.code is not None and not is_asked:
                server_code = server.code
                self._say(f"the server ended by itself with {server_code}: stopping the training")
            if not is_asked and (self._stop.received is not None or server_code is not None):
                is_asked = True
                seconds = self._attempt.signal_seconds * SAVED_SHARE
                deadline = min(deadline, time.monotonic() + seconds)
                self._say(f"{self._stop.received or 'SIGUSR1'}: passed on to the training, which has {seconds:.0f} s to save")
                training.ask_to_end()
            deadline = min(deadline, time.monotonic() + self._patience(read_records(self._attempt.logs)))
        if training.code is None:
            self._say("the training does not end by itself: its tasks are killed; the last checkpoint stands")
            training.kill(seconds=self._late)
        return server_code

    def _patience(self, records: list[TaskRecord]) -> float:
        """How long to wait for the tasks that have not ended, or for srun to notice that all have."""
        if len(records) == self._attempt.tasks:
            return self._late
        decides = any(record.exit_code or record.node == 0 for record in records)
        return REST_SECONDS if decides else float("inf")

    def _last_records(self) -> list[TaskRecord]:
        """The records of all tasks, or those that are there after a while."""
        deadline = time.monotonic() + self._late
        while len(records := read_records(self._attempt.logs)) < self._attempt.tasks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return records

    def _judge(self, records: list[TaskRecord], server_code: int | None) -> Verdict:
        for record in records:
            self._say(f"training on {record.host} ended with {record.exit_code}")
        return judge(
            records,
            tasks=self._attempt.tasks,
            server_code=server_code,
            has_bug=_has_bug(RunFolder(self._attempt.run), since=self._began),
            is_unwanted=self._is_unwanted(),
        )

    @property
    def _late(self) -> float:
        """How long what should have come may be late."""
        return LATE_SECONDS if self._stop.received is None else HURRY_SECONDS

    def _is_unwanted(self) -> bool:
        """Whether whoever stopped the job wants it to stay stopped: TERM says so, unless it comes from another job's need."""
        return self._stop.received not in (None, "SIGUSR1") and not self._job.is_preempted()

    def _tell(self, line: str) -> None:
        if time.monotonic() - self._told > TOLD_SECONDS:
            self._told = time.monotonic()
            self._say(line)


@contextlib.contextmanager
def _step(command: Sequence[str]) -> Iterator[Step]:
    """A step, which has ended when the block has: where an exception ends that, the tasks may save before they are killed."""
    step = Step(command)
    try:
        yield step
    except BaseException:
        step.ask_to_end()
        step.wait(END_SECONDS)
        raise
    finally:
        if step.code is None:
            step.kill(seconds=LATE_SECONDS)


@contextlib.contextmanager
def _key(server: Server) -> Iterator[tuple[Address, str]]:
    """(the server's address, its key): made for the block, in a file of mode 0600."""
    parts = urlsplit(server.url)
    if parts.hostname is None or parts.port is None:
        raise RefusedError(f"--server-url {server.url}: http://HOST:PORT is wanted.")
    address = parse_address(parts.hostname, parts.port)
    atomic.remove_file(server.key)
    find_key(str(server.key), os.environ, address)
    try:
        yield address, read_key(server.key)
    finally:
        atomic.remove_file(server.key)
