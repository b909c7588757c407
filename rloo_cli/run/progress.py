"""What a run shows while it runs: a live view on a terminal; elsewhere a plain line a step and a sign of life each minute."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from rloo_cli.run.live import LiveArea
from rloo_cli.run.live_view import Sample, Shown, evaluation_values, format_seconds, step_values, view_lines

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
RECENT_STEPS = 20
"""The time left is judged by the mean of this many steps."""
REWARDS_KEPT = 1000
"""Steps that the curve of rewards goes back."""


class LastingConsole(Console):
    """A console that falls silent when its reader goes away (`rloo train … | head`), where rich would end the program.

    What a terminal would obey in a text, such as a folder's name, is spelled out.
    """

    taker: Callable[[str], None] | None = None
    """Who shows messages in its place, while a live view owns the terminal."""

    def say(self, message: str) -> None:
        """Show a message as it is."""
        if self.taker is not None:
            self.taker(message)
        else:
            self.print(message, markup=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich has it."""
        if not text.isprintable():
            text = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
        return super().render_str(text, **options)

    def on_broken_pipe(self) -> None:
        """Say no more; the run goes on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """The progress display of one run. Use it as a context manager, or call `close`.

    Args:
        total_steps: optimizer steps of the whole run; 0 = there are none, as in an evaluation.
        start_step: steps done before this attempt.
        logging_steps: on a terminal, every n-th step also leaves a line of its own (plain output has every step).
        console: where to; None = standard output.
        clock: seconds, rising.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        logging_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._total = total_steps
        self._step = start_step
        self._logging_steps = logging_steps
        self._console = console or LastingConsole()
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._started = self._last_step = self._last_sign = clock()
        self._durations: tuple[float, ...] = ()
        self._row: Mapping[str, float] = {}
        self._evaluation: Mapping[str, float] = {}
        self._sample: Sample | None = None
        self._rewards: tuple[float, ...] = ()
        self._phases: list[tuple[str, float]] = [("starting", self._started)]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live: LiveArea | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_live(self) -> bool:
        """Whether a live view owns the terminal."""
        return self._live is not None

    def __enter__(self) -> Progress:
        if self._console.is_interactive and not self._console.is_dumb_terminal and not self._console.quiet:
            self._live = LiveArea(self._console, self._view)
            self._live.start()
            if isinstance(self._console, LastingConsole):
                self._console.taker = self._live.say
        else:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the display; safe to call twice."""
        self._closed.set()
        if self._live is not None:
            live, self._live = self._live, None
            if isinstance(self._console, LastingConsole):
                self._console.taker = None
            live.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the program does in the block (`generate`, `reward`); phases nest."""
        self._phases.append((name, self._clock()))
        try:
            yield
        finally:
            self._phases.pop()

    def step(self, row: Mapping[str, float], sample: Sample | None = None) -> None:
        """Show a finished optimizer step by its row of metrics, and one of its completions where it has new ones."""
        now = self._clock()
        # The row knows the step alone; the clock has loading, waiting for a server and evaluation in the first one.
        self._durations = (*self._durations, row.get("perf/seconds/step", now - self._last_step))[-RECENT_STEPS:]
        self._last_step = now
        self._phases[0] = ("between steps", now)
        self._step, self._row = int(row["step"]), dict(row)
        self._sample = sample or self._sample
        if "reward" in row:
            self._rewards = (*self._rewards, row["reward"])[-REWARDS_KEPT:]
        if self._live is None or self._step % self._logging_steps == 0 or self._step == self._total:
            self._print(self.step_line(self._width()))

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Show an evaluation by its row of metrics."""
        self._evaluation = dict(row)
        head, width = f"step {int(row['step'])}/{self._total} | evaluation | ", self._width()
        self._print(head + evaluation_values(row, width - len(head) if width is not None else None))

    def note(self, message: str) -> None:
        """Show a message of its own, above the live view."""
        self._print(message)

    def step_line(self, width: int | None = None) -> str:
        """The line of the last step, `step 12/300 | reward 0.512 | … | 1m 20s left`, as many of its values as `width` columns hold."""
        head, remaining = f"step {self._step}/{self._total}", self.seconds_left()
        tail = [f"{format_seconds(remaining)} left"] if remaining is not None and self._step < self._total else []
        room = width - len(" | ".join([head, "", *tail])) if width is not None else None
        values = step_values(self._row, room)
        return " | ".join([head, *([values] if values else []), *tail])

    def heartbeat_line(self) -> str | None:
        """A sign of life if nothing was printed for a minute: which phase it is and for how long."""
        now = self._clock()
        if now - self._last_sign < self._heartbeat_seconds:
            return None
        name, since = self._phases[-1]
        step = f"step {self._step}/{self._total} | " if self._total else ""
        return f"{step}still in {name} for {format_seconds(now - since)}"

    def seconds_left(self) -> float | None:
        """Seconds until the last step at the recent pace; None before the first step."""
        durations = self._durations
        return (self._total - self._step) * sum(durations) / len(durations) if durations else None

    def _view(self, width: int, height: int) -> list[Text]:
        name, since = self._phases[-1]
        now = self._clock()
        shown = Shown(
            step=self._step,
            total=self._total,
            elapsed=now - self._started,
            left=self.seconds_left(),
            row=self._row,
            rewards=self._rewards,
            evaluation=self._evaluation,
            sample=self._sample,
            phase=name,
            phase_seconds=now - since,
        )
        return view_lines(shown, width=width, height=height)

    def _width(self) -> int | None:
        """Columns that a line may have; None where lines do not wrap."""
        return self._console.width if self._console.is_terminal else None

    def _print(self, message: str) -> None:
        self._last_sign = self._clock()
        if self._live is not None:
            self._live.say(message)
            return
        try:
            with self._lock:
                self._console.print(message.replace("\x1b", "\\x1b"), markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            self._console.quiet = True
            logger.warning("nothing more is shown: the output cannot be written (%s)", error.strerror)

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._heartbeat_seconds)):
            line = self.heartbeat_line()
            if line is not None:
                self._print(line)
