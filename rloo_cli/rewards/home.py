"""What a worker's process is like before a call, and that again after the call changed it."""

from __future__ import annotations

import contextlib
import io
import locale
import os
import signal
import sys
from typing import Any

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
FIXED_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Home:
    """Folder, environment, standard streams, signals, timers, umask, recursion limit and locale, as they are when this is made.

    What a function keeps in its own modules stays: caches are meant to. Threads stay too.
    """

    def __init__(self, *, folder: str, output: int) -> None:
        """`output`: a file descriptor, where stdout and stderr go; `folder` becomes the working folder."""
        self._folder = folder
        self._output = output
        self._stdin = os.open(os.devnull, os.O_RDONLY)
        self._stdout: Any = None
        self._stderr: Any = None
        self._environment = dict(os.environ)
        self._recursion_limit = sys.getrecursionlimit()
        self._umask = os.umask(0o077)
        self._locale = locale.setlocale(locale.LC_ALL)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals() if number not in FIXED_SIGNALS}
        self.restore()

    def restore(self) -> None:
        """Undo what a call may have done to the process."""
        for timer in TIMERS:
            signal.setitimer(timer, 0)
        os.umask(self._umask)
        sys.setrecursionlimit(self._recursion_limit)
        self._restore_streams()
        self._restore_signals()
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)

    def _restore_streams(self) -> None:
        os.dup2(self._stdin, 0)
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)
        if self._stdout is None or self._stdout.closed:
            self._stdout = _stream(1)
        if self._stderr is None or self._stderr.closed:
            self._stderr = _stream(2)
        sys.stdout, sys.stderr = self._stdout, self._stderr
        with contextlib.suppress(OSError):
            self._stdout.flush()

    def _restore_signals(self) -> None:
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: set by C code, which Python cannot set again
                signal.signal(number, handler)


def _stream(descriptor: int) -> Any:
    # Not strict: completions may hold lone surrogates, and printing them is no failure of a reward.
    raw = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
