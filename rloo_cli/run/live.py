"""A few lines at the foot of a terminal that are drawn anew a few times a second, and what is said above them.

All of it is written by one thread, a frame at a time in one write, so that a slow terminal keeps nobody waiting: who has something to say
leaves it here. The cursor stays visible: a program that is killed leaves the terminal as it was.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from rloo_cli.run.visible import visible

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_FRAMES = 0.25
MOST_MESSAGES = 5000
"""Kept between two frames; of more, the newest."""
LONGEST_PRINT = 2000
"""Characters of a printed line that are shown."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CLEAR_BELOW = "\x1b[J"
TOGETHER, SHOWN = "\x1b[?2026h", "\x1b[?2026l"
"""Around what a terminal is to show at once, if it knows how to."""
MOST_COLUMNS = 100
"""Longer lines are hard to read, and fold when the terminal is made narrower."""


class LiveArea:
    """Owns the foot of a terminal from `start` to `stop`, and sys.stdout and sys.stderr where they go to it.

    Args:
        console: the terminal.
        draw: the lines for a width and a height.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]) -> None:
        self._console = console
        self._draw = draw
        self._messages: deque[str] = deque(maxlen=MOST_MESSAGES)
        self._cells: list[int] = []
        """Columns of each line of the frame that stands."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live view", daemon=True)
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to draw."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._undo.enter_context(_replaced(name, _Printed(stream, self.say)))
        self._thread.start()

    def say(self, message: str) -> None:
        """Have a message shown above; returns at once, whoever calls it, a signal's handler too."""
        self._messages.append(message)

    def stop(self) -> None:
        """Show what was said, take the lines away, and let go of the streams; safe to call twice."""
        self._undo.close()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(SECONDS_BETWEEN_FRAMES):
                self._frame(self._draw(min(self._console.width - 1, MOST_COLUMNS), self._console.height - 1))
            self._frame([])
        except (OSError, ValueError) as error:  # the terminal is gone, or its stream is closed
            self._console.quiet = True
            logger.warning("nothing more is shown: the terminal cannot be written to (%s)", error)

    def _frame(self, lines: Sequence[Text]) -> None:
        """Write the messages and the lines over the frame that stands."""
        top = self._to_the_top(self._console.width)
        said = "".join(self._rendered(Text(visible(message))) + "\n" for message in self._taken())
        body = said + "\n".join(self._rendered(line) for line in lines)
        self._cells = [line.cell_len for line in lines]
        out = self._console.file
        out.write(f"{TOGETHER}{top}{CLEAR_BELOW}{body}{SHOWN}")
        out.flush()

    def _to_the_top(self, width: int) -> str:
        """To where the frame begins; one drawn on a wider terminal is folded by now."""
        rows = sum(max(1, -(-cells // width)) for cells in self._cells)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _taken(self) -> list[str]:
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def _rendered(self, text: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(text, end="", highlight=False)
        return captured.get()


class _Printed:
    """A stream whose whole lines are said above the live lines as long as they are there; everything else is the real stream's."""

    def __init__(self, stream: IO[str], say: Callable[[str], None]) -> None:
        self.rich_proxied_file = stream
        """Where a rich console writes that was made for the stream."""
        self._say = say
        self._lock = threading.RLock()
        self._rest = ""
        self._is_over = False

    def write(self, text: str) -> int:
        """Take a text; what has no line's end yet waits for it."""
        if self._is_over:
            return self.rich_proxied_file.write(text)
        with self._lock:
            *lines, rest = (self._rest + text).split("\n")
            self._rest = rest[-LONGEST_PRINT:]
        for line in lines:
            self._say(_printable(line))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Take several."""
        for line in lines:
            self.write(line)

    def end(self) -> None:
        """Say what waits for its line's end, and from now on write to the real stream: somebody may have kept this one."""
        self._is_over = True
        if self._rest:
            self._say(_printable(self._rest))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def _printable(line: str) -> str:
    """A printed line: of what a bar wrote over itself the last, with what a terminal would obey spelled out."""
    return visible(COLOUR.sub("", line.rstrip("\r").rpartition("\r")[2][:LONGEST_PRINT]))


@contextlib.contextmanager
def _replaced(name: str, stream: _Printed) -> Iterator[None]:
    before = getattr(sys, name)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        if getattr(sys, name) is stream:
            setattr(sys, name, before)
        stream.end()
