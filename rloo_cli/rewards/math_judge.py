"""The reward's side of math_process: questions about golds and answers, each answered in bounded time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import rloo_cli
from rloo_cli.recipe.install import install_command

CPU_SECONDS = 3.0
"""CPU time that parsing and comparing one answer may take; beyond it the answer does not count as right."""

WALL_SECONDS = 25.0
"""The same on a machine with other work, and with the first start of the process; below the reward's default timeout of 30."""

MEMORY_MB = 2048
"""Address space of the process."""

STARTS = 3
"""Times a request is sent before the process counts as broken."""


def require_math_verify(reward: str) -> None:
    """Raise ImportError with the install command where math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"{reward} needs math-verify: {install_command('math')}")


def ask_judge(*, gold: tuple[str, ...], answer: str | None = None, show: bool = False) -> dict[str, Any] | None:
    """{"parsed", "shown"} of a gold, or with an answer {"score", "shown"}; None where time or memory ran out."""
    return _judge(os.getpid()).ask({"gold": gold, "answer": answer, "show": show})


@lru_cache(maxsize=1)
def _judge(pid: int) -> _Judge:
    """The process's own judge: after a fork the parent's pipes are not the child's to use."""
    return _Judge()


class _Judge:
    """A math_process, started when first asked and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, None where the process gave up. Raises RuntimeError where the process cannot be kept running."""
        message = json.dumps(request).encode() + b"\n"
        with self._lock:
            for _ in range(STARTS):
                if self._process is None:
                    self._process = _start()
                try:
                    return self._exchange(self._process, message)
                except TimeoutError:
                    self._end(self._process)
                    return None
                except (BrokenPipeError, EOFError):  # somebody killed it, which says nothing about the answer
                    self._end(self._process)
        raise RuntimeError(f"the process that compares mathematics ended {STARTS} times; is math-verify installed whole?")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        process.wait()
        self._process = None

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        deadline = time.monotonic() + WALL_SECONDS
        reply = b""
        while not reply.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise EOFError
            reply += piece
        answer: dict[str, Any] | None = json.loads(reply)
        return answer


def _start() -> subprocess.Popen[bytes]:
    # -P: a file named sympy.py in the working directory must not be what math_process imports.
    root = str(Path(rloo_cli.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rloo_cli.rewards.math_process", str(CPU_SECONDS), str(MEMORY_MB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, "PYTHONPATH": path},
    )
