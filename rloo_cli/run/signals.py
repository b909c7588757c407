"""Signals that stop a run: the handler only sets a flag, the loop asks for it where stopping is safe."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rloo_cli.errors import InterruptedTwiceError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is a terminal that went away; under nohup it is ignored, and stays so."""

GRACE_SECONDS = 3.0
"""After a second Ctrl-C the program unwinds; what is not done by then is ended the hard way."""


class StopRequested(Exception):
    """A signal asked the run to stop. Raised by StopSignal.check alone; never leaves the training loop."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class StopSignal:
    """Catches SIGTERM, SIGUSR1, SIGINT and SIGHUP while its block runs, and remembers the first.

    A second SIGINT raises InterruptedTwiceError wherever the main thread stands; `leave` is called if that does not end the process
    in time. Outside the main thread no handler can be installed: then only `request` sets the flag.

    Example: `with StopSignal() as stop: … stop.check() …`
    """

    def __init__(self, *, leave: Callable[[], None] | None = None, grace_seconds: float = GRACE_SECONDS) -> None:
        self.received: str | None = None
        """Name of the first signal, `SIGTERM`; None = go on."""
        self._leave = leave or leave_now
        self._grace_seconds = grace_seconds
        self._interrupts = 0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
            self._old = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            # None: the handler before was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self.received is not None:
            raise StopRequested(self.received)

    def request(self, signal_name: str) -> None:
        """Ask for a stop from within the program, as another process' signal does."""
        self.received = self.received or signal_name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 2:
                watchdog = threading.Timer(self._grace_seconds, self._leave)
                watchdog.daemon = True
                watchdog.start()
                raise InterruptedTwiceError("interrupted twice: left at once; `--resume` goes on from the last checkpoint.")
            if self._interrupts > 2:
                self._leave()


def leave_now() -> None:
    """End this process and all its children at once, with exit code 130."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(InterruptedTwiceError.exit_code)
