"""Runs programs and their tests for python_tests_reward: a JSON request on standard input, `[[passed, note], …]` on standard output.

A script for `python -I`, standard library only. It forks a process a program, which limits itself, changes into an empty
folder and runs the code; this process reads what the tests report, keeps the deadline, and kills whatever the program
left running. NO SANDBOX: what the limits do not name, the code can do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_FILE = 16 * 2**20
LARGEST_REPORT = 2**20
OPEN_FILES = 64
KILL_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves running becomes this process's child, and is found
    limits = {"seconds": request["seconds"], "memory_mb": request["memory_mb"]}
    print(json.dumps([_outcome(program["code"], program["tests"], **limits) for program in request["programs"]]))


def _outcome(code: str, tests: list[dict[str, Any]], *, seconds: float, memory_mb: int) -> tuple[int, str]:
    """Number of tests passed, and a note."""
    if not tests:
        return 0, "no tests"
    count = sum(test["is_test"] for test in tests)
    token = secrets.token_hex(16)
    reader, writer = os.pipe()
    folder = tempfile.mkdtemp()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_program(code, tests, token, writer, folder, seconds=seconds, memory_mb=memory_mb)
    os.close(writer)
    try:
        report = b"".join(_read(reader, time.monotonic() + seconds))
    finally:
        os.close(reader)
        _kill_descendants(child)
        shutil.rmtree(folder, ignore_errors=True)
    lines = report.decode("utf-8", "replace").splitlines()
    passed = min(count, lines.count(f"{token} passed"))
    reason = next((line[len(token) + 1 :] for line in lines if line.startswith(token) and not line.endswith(" passed")), None)
    if reason is None and passed < count:
        reason = "out of time, or ended early"
    return passed, f"{passed} of {count} passed" + (f"; {reason}" if reason else "")


def _read(reader: int, deadline: float) -> Iterator[bytes]:
    """What the program reports until it ends, the deadline passes, or it reports too much."""
    total = 0
    while total < LARGEST_REPORT and select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 65536)
        if not piece:
            return
        total += len(piece)
        yield piece


def _run_program(code: str, tests: list[dict[str, Any]], token: str, writer: int, folder: str, *, seconds: float, memory_mb: int) -> None:
    """Run the code and its tests, report over `writer`, and end this process."""
    try:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.environ.update(HOME=folder, TMPDIR=folder)
        _limit(seconds, memory_mb)

        def report(line: str) -> None:
            os.write(writer, f"{token} {line}\n".encode("utf-8", "replace"))

        module = types.ModuleType("solution")  # not __main__: a program's own `if __name__ == "__main__"` stays out
        sys.modules["solution"] = module
        if _execute(code, "<completion>", module, report):
            for test in tests:
                if _execute(test["source"], "<test>", module, report) and test["is_test"]:
                    report("passed")
    finally:
        os._exit(0)


def _execute(source: str, name: str, module: types.ModuleType, report: Any) -> bool:
    try:
        exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - the code under test may raise anything, SystemExit too
        report(f"{type(error).__name__}: {error}"[:200].replace("\n", " "))
        return False
    return True


def _limit(seconds: float, memory_mb: int) -> None:
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    whole_seconds = int(seconds) + 1
    for which, limit in (
        (resource.RLIMIT_CPU, whole_seconds),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # no forks or threads; the kernel does not hold root to it
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS knows some of these, and refuses others
            resource.setrlimit(which, (limit, limit))


def _kill_descendants(child: int) -> None:
    """Kill the program's process group, then all that became a child of this process, until there is none."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for process in {child, *_children()}:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()]
    return []


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; OSError elsewhere."""
    if sys.platform != "linux" or ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError("prctl")


if __name__ == "__main__":
    main()
