"""The server as a family of processes: started in a session of its own, watched, and ended with all its workers."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
STOP_SECONDS = 15.0
"""How long vLLM may take to leave by itself."""
LINGER_SECONDS = 2.0
"""How long it may stay without its engine, while clients hold connections open."""
KILL_SECONDS = 5.0
"""How long killed processes may take to be gone; one that is not by then sits in the kernel."""
TIDY_SECONDS = 3.0
"""How long Python's resource tracker, which leaves by itself after all others, may take to remove their shared memory."""
TRACKER = "multiprocessing.resource_tracker"
WORKER_NAMES = "VLLM::"
"""How vLLM names the processes of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket on which a process of the server takes connections."""

    host: str
    port: int
    process: str

    @property
    def is_loopback(self) -> bool:
        """Whether programs of this machine alone reach it."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback


class ServerProcess:
    """A started server. `process.stdout` is what it and its workers say."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        # What a dead server leaves behind becomes our child, so that it can be found and ended.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        parent = os.getpid()
        self.process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for us alone; we decide how the server ends
            preexec_fn=lambda: _die_with(parent),  # no thread of ours runs yet
        )
        self._known: dict[int, psutil.Process] = {}
        self._workers: dict[psutil.Process, str] = {}

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def family(self) -> list[psutil.Process]:
        """Every living process of the server: its descendants and whoever shares its session."""
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            for member in (leader, *leader.children(recursive=True)):
                self._known.setdefault(member.pid, member)
        for orphan in psutil.Process().children():
            if orphan.pid not in self._known and _session_of(orphan.pid) == self.process.pid:
                self._known[orphan.pid] = orphan
        return [member for member in self._known.values() if _is_alive(member)]

    def remember_workers(self) -> None:
        """From now on `lost_worker` tells when one of the engine's present processes is gone."""
        self._workers = {member: name for member in self.family() if (name := _name(member)).startswith(WORKER_NAMES)}

    def lost_worker(self) -> str | None:
        """The name of an engine's process that is gone, None while all are there."""
        return next((f"{name} (pid {worker.pid})" for worker, name in self._workers.items() if not _is_alive(worker)), None)

    def listeners(self) -> list[Listener]:
        """Every TCP socket on which the family listens."""
        found = []
        for member in self.family():
            with contextlib.suppress(psutil.Error):
                for connection in member.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append(Listener(host=connection.laddr.ip, port=connection.laddr.port, process=_name(member)))
        return found

    def stop(self, *, seconds: float = STOP_SECONDS) -> list[int]:
        """End the whole family, asking first; the pids that could not be ended come back (none, unless the kernel holds them)."""
        self.family()
        if seconds > 0 and self.exit_code is None:
            self.process.send_signal(signal.SIGTERM)
            self._wait(seconds)
        self._end(lambda member: TRACKER not in _words(member), KILL_SECONDS, at_once=True)
        return self._end(lambda member: True, TIDY_SECONDS + KILL_SECONDS, at_once=False)

    def _wait(self, seconds: float) -> None:
        """Until the server has left, at most these seconds; without an engine it only waits for answers that nobody makes."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < deadline:
            if self._workers and not any(map(_is_alive, self._workers)):
                deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
                self._workers = {}
            time.sleep(POLL_SECONDS)

    def _end(self, which: Callable[[psutil.Process], bool], seconds: float, *, at_once: bool) -> list[int]:
        """Kill these members until none is left or the time is over, at once or after TIDY_SECONDS; the pids that are left."""
        started = time.monotonic()
        while (left := [member for member in self.family() if which(member)]) and time.monotonic() < started + seconds:
            for member in left if at_once or time.monotonic() > started + TIDY_SECONDS else ():
                with contextlib.suppress(psutil.Error):
                    member.kill()
            self._reap()
            time.sleep(POLL_SECONDS)
        self._reap()
        return [member.pid for member in left]

    def _reap(self) -> None:
        """Take the exit codes of those that became our children."""
        self.process.poll()
        for pid in self._known:
            if pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _die_with(parent: int) -> None:
    """In the new process: be ended when `parent` is, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _is_alive(member: psutil.Process) -> bool:
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _words(member: psutil.Process) -> str:
    """Its command line."""
    try:
        return " ".join(member.cmdline())
    except psutil.Error:
        return ""


def _name(member: psutil.Process) -> str:
    try:
        return member.name()
    except psutil.Error:
        return "?"
