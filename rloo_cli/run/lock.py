"""The lock of a run folder: one run at a time, with a name for whoever holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rloo_cli.errors import StorageError
from rloo_cli.run import atomic
from rloo_cli.run.disk_errors import storage_errors

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What flock answers on file systems without locks; the file's content decides there."""

LOCKS_FOR_ALL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "nfs", "nfs4", "ceph", "gpfs"}
"""File systems of one machine, where a container's host name changes with each start, and network file systems that share locks."""

START_TOLERANCE = 2.0
"""Seconds by which two readings of a process' start time may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock."""

    pid: int
    host: str
    started: float
    """When the process started, seconds since 1970: it tells a process from a later one with the same pid."""

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        return cls(pid=os.getpid(), host=socket.gethostname(), started=psutil.Process().create_time())

    def lives_here(self) -> bool:
        """Whether the process runs on this machine."""
        return self.host == socket.gethostname() and _runs(self.pid, self.started)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Holder | None]:
    """Hold the lock file `path` for the block, which gets the dead process whose lock was taken over, or None.

    Raises:
        StorageError: another process holds it: `locked by pid 12 on host a`.
    """
    descriptor, dead = _acquire(path)
    try:
        yield dead
    finally:
        # Removed while still held: who opened it meanwhile finds another inode under the name, and tries again.
        with contextlib.suppress(OSError):
            atomic.fs.unlink(path)
        atomic.fs.close(descriptor)


def ensure_unlocked(path: Path) -> None:
    """Raise the StorageError of `locked` if another process holds the lock file now; nothing is changed."""
    with storage_errors("look at", path), contextlib.suppress(FileNotFoundError):
        descriptor = atomic.fs.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked_error(path, _read(descriptor)) from None
        finally:
            atomic.fs.close(descriptor)


def _acquire(path: Path) -> tuple[int, Holder | None]:
    with storage_errors("lock", path):
        while True:
            with contextlib.ExitStack() as stack:
                descriptor = atomic.fs.open(path, os.O_RDWR | os.O_CREAT)
                stack.callback(atomic.fs.close, descriptor)
                holder = _read(descriptor)
                _take(descriptor, holder, path)
                if _is_current(descriptor, path):
                    _sign(descriptor)
                    stack.pop_all()
                    return descriptor, holder


def _take(descriptor: int, holder: Holder | None, path: Path) -> None:
    is_foreign = holder is not None and holder.host != socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked_error(path, _read(descriptor) or holder) from None
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
        if holder is not None and (is_foreign or holder.lives_here()):
            raise _locked_error(path, holder) from None
    if is_foreign and not _is_heard_elsewhere(path):
        raise _locked_error(path, holder)


def _is_heard_elsewhere(path: Path) -> bool:
    """Whether a flock on this file is seen by every machine that can see the file. Then one that is free is nobody's, whatever it says."""
    folder = path.parent.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if nearest is None:
        return False
    return nearest.fstype in LOCKS_FOR_ALL or (nearest.fstype == "lustre" and "flock" in nearest.opts.split(","))


def _locked_error(path: Path, holder: Holder | None) -> StorageError:
    who = f"pid {holder.pid} on {holder.host}" if holder else "a process that is just starting"
    left = ""
    if holder and holder.host != socket.gethostname():
        left = f" (whether that still runs cannot be seen from here: if not, remove {path})"
    elif holder and holder.host == socket.gethostname() and not holder.lives_here():
        left = " (that process is gone, but one of its children still runs and holds the lock)"
    return StorageError(f"{path.parent} is locked by {who}{left}: one run at a time. Wait for it, end it, or choose another --output-dir.")


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _sign(descriptor: int) -> None:
    atomic.fs.truncate(descriptor, 0)
    atomic.fs.write(descriptor, json.dumps(asdict(Holder.me())).encode())


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is still the one under that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _runs(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < START_TOLERANCE
    except psutil.Error:
        return False
