"""Signals that stop a run: the handler sets a flag, and the loop asks for it where stopping is safe.

Where nothing can be lost, as while a model is loaded, `StopSignal.at_once` lets the handler itself end the block.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from rloo_cli.errors import InterruptedTwiceError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is a terminal that went away; under nohup it is ignored, and stays so."""

GRACE_SECONDS = 3.0
"""After a second Ctrl-C the program unwinds; what is not done by then is ended the hard way."""

LEFT_AT_ONCE = "interrupted twice: left at once; the last checkpoint that was saved stands, --resume goes on from it."


class StopRequested(KeyboardInterrupt):
    """A signal asked the run to stop. Raised by StopSignal alone; whoever owns it makes a StoppedError of it.

    Like its base it is no Exception, so that no library that answers exceptions takes it for a failure of its own.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class StopSignal:
    """Catches SIGTERM, SIGUSR1, SIGINT and SIGHUP while its block runs, and remembers the first.

    A second SIGINT raises InterruptedTwiceError wherever the main thread stands; `leave` is called if that does not end the process
    in time, or if the main thread is deep in C code, where no handler of Python's runs. Outside the main thread no handler can be
    installed: then, and before the block, only `request` sets the flag.

    A rank of several takes its launcher's word for a second one (`is_led`): the first may reach it twice, from the launcher and from
    whoever signals all processes. Of such ranks the main one shows that a signal was heard (`tells`), as it has the terminal.

    Example: `with StopSignal() as stop: … stop.check() …`
    """

    def __init__(
        self, *, leave: Callable[[], None] | None = None, grace_seconds: float = GRACE_SECONDS, is_led: bool = False, tells: bool = True
    ) -> None:
        self.received: str | None = None
        """Name of the first signal, `SIGTERM`; None = go on."""
        self._leave = leave or leave_now
        self._grace_seconds = grace_seconds
        self._is_led = is_led
        self._tells = tells
        self._interrupts = 0
        self._is_at_once = False
        self._old: dict[signal.Signals, Any] = {}
        self._undo = contextlib.ExitStack()
        self._tell: Callable[[str], None] = _tell_terminal

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            if not self._is_led:
                self._undo.enter_context(_watchdog(self._leave, self._grace_seconds))
            heard = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
            self._old = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            # None: the handler before was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}
        self._undo.close()

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self.received is not None:
            raise StopRequested(self.received)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """For the block a signal raises StopRequested wherever the main thread stands, and one that came before raises it now.

        For what takes long, cannot ask, and loses nothing: importing, reading data, loading a model.
        """
        before, self._is_at_once = self._is_at_once, True
        try:
            self.check()
            yield
        finally:
            self._is_at_once = before

    @contextlib.contextmanager
    def telling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """For the block `tell` shows that a signal was heard; it is called in the signal's handler."""
        before, self._tell = self._tell, tell
        try:
            yield
        finally:
            self._tell = before

    def request(self, signal_name: str) -> None:
        """Ask for a stop from within the program, as another process' signal does."""
        self.received = self.received or signal_name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        self.request(signal.Signals(number).name)
        self._interrupts += number == signal.SIGINT and not self._is_led
        if is_first and self._tells:
            self._tell(f"{self.received}: stopping, what was trained is saved; a second Ctrl-C leaves at once")
        if number == signal.SIGINT and self._interrupts == 2:
            raise InterruptedTwiceError(LEFT_AT_ONCE)
        if self._interrupts > 2:
            self._leave()
        if self._is_at_once and is_first:
            self.check()


@contextlib.contextmanager
def _watchdog(leave: Callable[[], None], grace_seconds: float) -> Iterator[None]:
    """Calls `leave` where the block has not ended `grace_seconds` after a second SIGINT, whatever the main thread does."""
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    old = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(ear, leave, grace_seconds), name="second Ctrl-C", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        mouth.close()
        thread.join()
        ear.close()


def _watch(ear: socket.socket, leave: Callable[[], None], grace_seconds: float) -> None:
    """Hear the numbers of signals from the interpreter's C handler until the other end is closed."""
    interrupts, deadline = 0, float("inf")
    while True:
        left = deadline - time.monotonic()
        if not select.select([ear], [], [], None if left == float("inf") else max(0.0, left))[0]:
            leave()
            return
        numbers = ear.recv(64)
        if not numbers:
            return
        interrupts += numbers.count(signal.SIGINT)
        if interrupts >= 2 and deadline == float("inf"):
            deadline = time.monotonic() + grace_seconds


def _tell_terminal(line: str) -> None:
    """Show a person at once that the key was heard. Written past Python's streams, whose locks the main thread may hold."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, f"\r\n{line}\r\n".encode())


def leave_now() -> None:
    """End this process and all its children at once, with exit code 130."""
    import psutil

    with contextlib.suppress(OSError):
        os.write(2, f"\n{LEFT_AT_ONCE}\n".encode())
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(InterruptedTwiceError.exit_code)
