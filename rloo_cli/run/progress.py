"""What a run shows while it runs: a live line on a terminal; elsewhere a plain line a step and a sign of life each minute."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
REFRESHES_PER_SECOND = 4
RECENT_STEPS = 20
"""The time left is judged by the mean of this many steps."""

SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("perf/tokens_per_second", "tok/s", "{:.0f}"),
    ("kl", "kl", "{:.4f}"),
    ("loss", "loss", "{:.4f}"),
    ("grad_norm", "grad", "{:.3f}"),
)
"""Metric, its short name, and how it is printed: the columns of a line, the most telling first."""

SHOWN_EVALUATION = (
    ("eval/reward", "reward {:.4f}"),
    ("eval/rewards/(.+)/mean", "{name} {:.4f}"),
    ("eval/rewards/(.+/pass@.+)", "{name} {:.4f}"),
    ("eval/completions/mean_length", "length {:.1f}"),
    ("eval/completions/clipped_ratio", "clipped {:.0%}"),
    ("eval/prompts", "{:.0f} prompts"),
)
"""Patterns of what an evaluation's line shows, in this order, and how; metrics.jsonl has everything."""


class LastingConsole(Console):
    """A console that falls silent when its reader goes away (`rloo train … | head`), where rich would end the program.

    What a terminal would obey in a text, such as a folder's name, is spelled out.
    """

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
        total_steps: optimizer steps of the whole run.
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
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._row: Mapping[str, float] = {}
        self._phases: list[tuple[str, float]] = [("starting", self._started)]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._live_line, console=self._console, refresh_per_second=REFRESHES_PER_SECOND, transient=True
            )
            self._live.start()
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
            self._live.stop()
            self._live = None
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

    def step(self, row: Mapping[str, float]) -> None:
        """Show a finished optimizer step by its row of metrics."""
        now = self._clock()
        # The row knows the step alone; the clock has loading, waiting for a server and evaluation in the first one.
        self._durations.append(row.get("perf/seconds/step", now - self._last_step))
        self._last_step = now
        self._phases[0] = ("recording", now)
        self._step, self._row = int(row["step"]), row
        if self._live is None or self._step % self._logging_steps == 0 or self._step == self._total:
            self._print(self.step_line())

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Show an evaluation by its row of metrics."""
        self._print(f"step {int(row['step'])}/{self._total} | evaluation | " + " | ".join(_shown_evaluation(row)))

    def note(self, message: str) -> None:
        """Show a message of its own, above the live line."""
        self._print(message)

    def step_line(self) -> str:
        """The line of the last step: `step 12/300 | reward 0.512 | … | 1m 20s left`."""
        parts = [f"step {self._step}/{self._total}", *self._values()]
        remaining = self.seconds_left()
        if remaining is not None and self._step < self._total:
            parts.append(f"{format_seconds(remaining)} left")
        return " | ".join(parts)

    def heartbeat_line(self) -> str | None:
        """A sign of life if nothing was printed for a minute: which phase it is and for how long."""
        now = self._clock()
        if now - self._last_sign < self._heartbeat_seconds:
            return None
        name, since = self._phases[-1]
        return f"step {self._step}/{self._total} | still in {name} for {format_seconds(now - since)}"

    def seconds_left(self) -> float | None:
        """Seconds until the last step at the recent pace; None before the first step."""
        if not self._durations:
            return None
        return (self._total - self._step) * sum(self._durations) / len(self._durations)

    def _values(self) -> list[str]:
        return [f"{name} {form.format(self._row[key])}" for key, name, form in SHOWN if key in self._row]

    def _live_line(self) -> Text:
        """The live line, its least telling parts left out until it fits the terminal."""
        name, since = self._phases[-1]
        remaining = self.seconds_left()
        left = [f"{format_seconds(remaining)} left"] if remaining is not None else []
        head = f"step {self._step}/{self._total}"
        phase = f"{name} {format_seconds(self._clock() - since)}"
        values = self._values()
        width = self._console.width - 1
        while values and len(" | ".join([head, *values, *left, phase])) > width:
            values.pop()
        text = Text(" | ".join([head, *values, *left, phase]), style="bold", no_wrap=True, overflow="ellipsis")
        text.truncate(width, overflow="ellipsis")
        return text

    def _print(self, message: str) -> None:
        self._last_sign = self._clock()
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


def format_seconds(seconds: float) -> str:
    """A duration as a person reads it: `42s`, `3m 05s`, `2h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _shown_evaluation(row: Mapping[str, float]) -> list[str]:
    shown = []
    for pattern, form in SHOWN_EVALUATION:
        for key, value in row.items():
            match = re.fullmatch(pattern, key)
            if match:
                shown.append(form.format(value, name=match[1] if match.groups() else ""))
    return shown
