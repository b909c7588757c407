"""The SQLite way: one run is brought to a save, forks there for n = 1, 2, 3 …, and each fork's n-th call to the file system fails.

A fork makes the save in a run folder that looks as it did before it, and ends: by the fault, by the error that the fault becomes, or
after a save that went on all the same (the forks share the reward workers, so none can train on). Its folder is put aside as
`cases/<n>/run`, its output beside it, and the next one begins. The first in which nothing failed is the last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MOST_CALLS = 1000
PID = re.compile(r"(?<=-)\d+(?=/|$)")
"""At the end of a temporary's name."""
SURVIVED = 77
"""Exit code of the fork in which nothing failed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the n-th fork ended."""

    n: int
    call: str
    """What failed: `write`, `fsync`, …"""
    code: int
    """As a wait status says it: negative for a signal."""
    output: str
    folder: Path
    """Its run folder."""

    def look(self) -> str:
        """All that the next start finds in the folder, logs aside: each file's content, but of a temporary (which it removes) the name.

        Two cases that look the same go on the same.
        """
        found = []
        for path in sorted(self.folder.rglob("*")):
            name = PID.sub("", str(path.relative_to(self.folder)))
            if path.is_file() and name != ".lock" and not name.startswith("logs/"):
                content = "" if ".tmp-" in name else hashlib.sha256(path.read_bytes()).hexdigest()
                found.append(f"{name} {content}")
        return "\n".join(found)


def run_cases(bench, name: str, *, step: int, settings, fault: Any, only=None) -> list[Case]:
    """Every case of a fault in the save of `step`, in order; the one that survived is not among them.

    Args:
        bench: the row's.
        name: of the folder for the cases.
        step: the save that is disturbed.
        settings: of the run.
        fault: what the failing call does, see `FailingFileSystem`.
        only: the calls that fail; None = all.
    """
    cases = bench.root / name
    cases.mkdir()
    outcome = bench.train(settings=settings, folder=cases / "run", inject=lambda: fork_at_save(cases, step, fault, only), timeout=240)
    if outcome.code != SURVIVED:
        raise RuntimeError(f"the forks did not come to an end: {outcome.code}, {outcome.tail()}")
    return list(_read(cases))


def _read(cases: Path) -> Iterator[Case]:
    folders = sorted((folder for folder in cases.iterdir() if folder.name.isdecimal()), key=lambda folder: int(folder.name))
    for folder in folders:
        told = json.loads((folder / "case.json").read_text())
        yield Case(**told, output=(folder / "output").read_text(errors="replace"), folder=folder / "run")


def fork_at_save(cases: Path, step: int, fault: Any, only: Any) -> None:
    """Replace `TrainingRun.save` by one that forks; the process in which it does so ends with SURVIVED."""
    from rloo_cli.training.training_run import TrainingRun

    save = TrainingRun.save

    def forking(self: Any) -> None:
        if self.step == step and self.saved_step != step:
            fork_all(cases, fault, only, lambda: save(self))
        else:
            save(self)

    TrainingRun.save = forking


def fork_all(cases: Path, fault: Any, only: Any, save: Callable[[], None]) -> None:
    """Never returns; raises in a fork what its save raised."""
    run, before = cases / "run", cases / "before"
    shutil.copytree(run, before)
    for n in range(1, MOST_CALLS):
        pid = os.fork()
        if pid == 0:
            _disturb(cases, n, fault, only, save)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == SURVIVED:
            os._exit(SURVIVED)
        _put_aside(cases, n, code)
        shutil.copytree(before, run)
    os._exit(1)


def _disturb(cases: Path, n: int, fault: Any, only: Any, save: Callable[[], None]) -> NoReturn:
    from failpoints import CALLS, FailingFileSystem

    from rloo_cli.run import atomic

    output = os.open(cases / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    atomic.fs = Told(cases / "call", n, fault, FailingFileSystem(n, fault, only=only or CALLS))
    save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(SURVIVED if atomic.fs.count < n else 0)


class Told:
    """A failing file system that leaves the name of the call that failed in a file, in time for a kill."""

    def __init__(self, file: Path, n: int, fault: Any, inner: Any) -> None:
        self._file, self._n, self._fault, self._inner = file, n, fault, inner

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._inner.count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def told(*arguments: Any) -> Any:
            if self._inner.count == self._n - 1 and name in self._inner.only:
                self._file.write_text(name)
            return method(*arguments)

        return told if callable(method) else method


def _put_aside(cases: Path, n: int, code: int) -> None:
    folder = cases / str(n)
    folder.mkdir()
    for name in ("run", "output"):
        shutil.move(cases / name, folder / name)
    (folder / "case.json").write_text(json.dumps({"n": n, "call": (cases / "call").read_text(), "code": code}))
