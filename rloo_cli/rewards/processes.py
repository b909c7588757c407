"""What the operating system is told about workers: die with the parent, adopt orphans, end a whole family. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OOM_SCORE = "/proc/self/oom_score_adj"
ROUNDS = 100
ROUND_SECONDS = 0.002
"""A family is killed in rounds, since it may fork meanwhile; what survives all of them sits in the kernel and dies later."""
SIGNALS_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    """A process as /proc tells it."""

    pid: int
    parent: int
    session: int
    is_zombie: bool


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """End this process when `parent`, which must be its parent, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_signals_to_the_trainer() -> None:
    """Do nothing at stop signals that a batch system or terminal sends to everybody; forked children get the defaults back."""
    for number in SIGNALS_LEFT_TO_THE_TRAINER:
        signal.signal(number, _do_nothing)


def default_signals() -> None:
    """Put the usual handlers back."""
    for number in SIGNALS_LEFT_TO_THE_TRAINER:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _do_nothing(number: int, frame: object) -> None:
    pass


def be_killed_first() -> None:
    """Offer this process to the kernel before the trainer when memory runs out; no core files."""
    with contextlib.suppress(OSError):
        descriptor = os.open(OOM_SCORE, os.O_WRONLY)
        os.write(descriptor, b"1000")
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(limit: int) -> None:
    """Let this process and each of its children hold at most this many bytes of private data."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def end_family(leader: int, *, known: Collection[int]) -> int:
    """The wait status of `leader`, a child of this process, after it, its session and all orphans that came of it are dead.

    `known`: this process' other children, which are left alone.
    """
    for _ in range(ROUNDS):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        family = [line for line in process_table() if _belongs(line, leader, known)]
        if all(line.pid == leader and line.is_zombie for line in family):
            break
        for line in family:
            _end(line, leader)
        time.sleep(ROUND_SECONDS)
    # Last of all, since its number could be given to another process afterwards.
    return os.waitpid(leader, os.WNOHANG)[1]


def end_children() -> None:
    """Kill whatever this process is still a parent of, and what becomes its child by that."""
    for _ in range(ROUNDS):
        family = [line for line in process_table() if line.parent == os.getpid()]
        if not family:
            return
        for line in family:
            _end(line, 0)
        time.sleep(ROUND_SECONDS)


def end_tree(leader: int) -> None:
    """Kill a child of this process and everything below it; it has to be the one that adopts what is left of its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGSTOP)  # so that it starts nothing more
    for _ in range(ROUNDS):
        below = [line for line in _descendants(leader) if not line.is_zombie]
        if not below:
            break
        for line in below:
            _end(line, leader)
        time.sleep(ROUND_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)


def _descendants(pid: int) -> list[ProcessLine]:
    table = process_table()
    found, parents = [], {pid}
    while children := [line for line in table if line.parent in parents]:
        found += children
        parents = {line.pid for line in children}
    return found


def end_sessions(leaders: Collection[int]) -> None:
    """Kill what is left of the sessions of these processes, their parent being dead."""
    for _ in range(ROUNDS):
        left = [line for line in process_table() if line.session in leaders and not line.is_zombie]
        if not left:
            return
        for line in left:
            _end(line, 0)
        time.sleep(ROUND_SECONDS)


def _end(line: ProcessLine, leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
        if not line.is_zombie:
            os.kill(line.pid, signal.SIGKILL)
        elif line.pid != leader and line.parent == os.getpid():
            os.waitpid(line.pid, os.WNOHANG)


def _belongs(line: ProcessLine, leader: int, known: Collection[int]) -> bool:
    if line.pid == leader or line.session == leader:
        return True
    return line.parent == os.getpid() and line.pid not in known


def children() -> set[int]:
    """The living children of this process."""
    return {line.pid for line in process_table() if line.parent == os.getpid()}


def process_table() -> list[ProcessLine]:
    """Every process of the machine."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                lines.append(ProcessLine(pid=int(folder.name), parent=int(fields[1]), session=int(fields[3]), is_zombie=fields[0] == "Z"))
    return lines


def thread_count() -> int:
    """The threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count, no paths
