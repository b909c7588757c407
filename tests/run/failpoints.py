"""A file system whose n-th call fails, for tests of what must survive. Install it with `monkeypatch.setattr(atomic, "fs", …)`."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

from rloo_cli.run.atomic import FileSystem

CALLS = ("open", "write", "fsync", "truncate", "close", "rename", "mkdir", "unlink", "rmdir", "chmod")


class FailingFileSystem(FileSystem):
    """Counts calls; from the `fail_at`-th on (or only there, with `once`) the fault happens instead.

    Faults: an errno; `short` (a write that takes half and whose successor fails with ENOSPC; other calls: ENOSPC); `kill` (SIGKILL).
    """

    def __init__(self, fail_at: int = 0, fault: int | str = errno.EIO, *, only: tuple[str, ...] = CALLS, once: bool = True) -> None:
        self.fail_at = fail_at
        self.fault = fault
        self.only = only
        self.once = once
        self.count = 0
        self.log: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in CALLS:
            return method
        return lambda *arguments: self._call(name, method, arguments)

    def _call(self, name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        self.log.append(name)
        if name not in self.only:
            return method(*arguments)
        self.count += 1
        due = self.fail_at and (self.count == self.fail_at or (self.count > self.fail_at and not self.once))
        return self._fail(name, method, arguments) if due else method(*arguments)

    def _fail(self, name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "short" and name == "write":
            descriptor, data = arguments
            self.fail_at += 1
            self.fault = errno.ENOSPC
            return os.write(descriptor, memoryview(data)[: len(data) // 2])
        if name == "close":
            method(*arguments)
        code = errno.ENOSPC if self.fault == "short" else int(self.fault)
        raise OSError(code, os.strerror(code))


def in_child(work: Any) -> int:
    """The status (`os.WIFSIGNALED` and so on) of a forked child that does `work` and exits 0, or 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def leftovers(folder: Path) -> list[str]:
    """Names of temporary files and folders anywhere below."""
    return sorted(path.name for path in folder.rglob(".tmp-*"))
