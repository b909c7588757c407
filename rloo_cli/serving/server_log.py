"""What vLLM said: the last lines of it, without the key, and out of them the reason why it ended."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from rloo_cli.errors import EngineError, RefusedError

KEPT_LINES = 3000
LONGEST_LINE = 4000
"""Characters; a longer line is cut."""
LEVELS = ("debug", "info", "warning", "error", "critical")

PREFIX = re.compile(r"^\((?P<process>\w[\w-]*) pid=\d+\) ?")
STAMP = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)[: ]\s*(\d\d-\d\d \d\d:\d\d:\d\d)? ?(\[[\w.]+:\d+\])? ?")
EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning))(: (?P<what>.*))?$")
USAGE = re.compile(r"^\w+\.py: error: (?P<what>.+)")
LONGEST_REASON = 500
"""Characters."""
ECHOES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "See root cause above",
    "WorkerProc initialization failed",
)
"""One process telling that another failed."""

REMEDIES: tuple[tuple[str, str], ...] = (
    ("address already in use", "Something else took the port meanwhile: stop it, or choose another --port."),
    ("larger than the available kv cache memory", "Give a smaller --max-model-len, or more memory: --gpu-memory-utilization."),
    ("no available memory for the cache blocks", "Raise --gpu-memory-utilization, or lower --max-model-len."),
    ("on kv cache allocation is less than requested", "Free some memory, or ask for less: `-- --kv-cache-memory-bytes BYTES`."),
    ("free memory on device", "Another process uses the device: end it, or lower --gpu-memory-utilization."),
    ("out of memory", "Lower --gpu-memory-utilization or --max-model-len, or spread the model: --tensor-parallel-size."),
    ("head_size", "This model's heads have a size that vLLM's CPU attention lacks."),
    ("head size", "This model's heads have a size that vLLM's CPU attention lacks."),
    ("is not supported by vllm", "Try --model-impl transformers."),
    ("trust_remote_code", "The model's folder wants to run code of its own: --trust-remote-code, if you trust it."),
    ("max_model_len", "Give another --max-model-len."),
    ("connecterror", "The model is no folder here, and the hub could not be reached."),
    ("offline mode", "The model is not in the cache of this machine; download it, or name its folder."),
)


class ServerLog:
    """Reads a stream of lines in a thread until it ends, and keeps the last ones.

    `show` gets every line at or above `level`, with its traceback, until `quiet()`.
    """

    def __init__(self, *, secret: str | None, level: str, show: Callable[[str], None]) -> None:
        self._secret = secret
        self._least = LEVELS.index(level)
        self._show: Callable[[str], None] | None = show
        self._showing = False
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[bytes]) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True, name="vllm log")
        self._thread.start()

    def quiet(self) -> None:
        """Show nothing from here on; what a server says while it is stopped frightens for nothing."""
        self._show = None

    def finish(self, seconds: float) -> None:
        """Wait for the end of the stream, which a process that lives on may keep open."""
        if self._thread is not None:
            self._thread.join(seconds)

    def lines(self, *, seconds: float | None = None) -> list[str]:
        """The last lines, or those of the last seconds."""
        since = 0.0 if seconds is None else time.monotonic() - seconds
        return [line for when, line in list(self._lines) if when >= since]

    def last_news(self) -> str:
        """The last thing vLLM told at INFO or above, without stamps; empty in the beginning."""
        for line in reversed(self.lines()):
            text = PREFIX.sub("", line)
            if STAMP.match(text) and (news := STAMP.sub("", text).strip()) and not news.startswith(("Route:", "Available routes")):
                return news[:160]
        return ""

    def _read(self, stream: IO[bytes]) -> None:
        while line := stream.readline(LONGEST_LINE):
            self.add(line.decode("utf-8", "replace").rstrip("\r\n"))

    def add(self, line: str) -> None:
        """Keep a line."""
        if self._secret:
            line = line.replace(self._secret, "***")
        self._lines.append((time.monotonic(), line))
        stamp = STAMP.match(PREFIX.sub("", line))
        if stamp:  # a line without a level goes with the one before: a traceback's, for instance
            self._showing = LEVELS.index(stamp["level"].lower()) >= self._least
        if self._showing and self._show is not None:
            self._show(line)


def root_cause(lines: list[str]) -> str:
    """The exception that began it, as its name and message; empty when none was told."""
    exceptions = [text for text in map(_text, lines) if EXCEPTION.match(text) and "Warning" not in text.split(":")[0]]
    return next((text[:LONGEST_REASON] for text in exceptions if not any(echo in text for echo in ECHOES)), "")


def last_words(lines: list[str]) -> str:
    """The last error, else the last line; empty when nothing was said."""
    errors = [_text(line) for line in lines if re.search(r"\b(ERROR|CRITICAL)\b|error:", line)]
    said = [text for text in (*map(_text, lines), *errors) if text]
    return said[-1][:LONGEST_REASON] if said else ""


def refused_options(lines: list[str]) -> RefusedError | None:
    """The error to raise where vLLM's own command line did not take what was given."""
    found = next((match for line in reversed(lines) if (match := USAGE.search(line))), None)
    return None if found is None else RefusedError(f"vLLM does not take these options: {found['what'][:LONGEST_REASON]}")


def failure(lines: list[str], *, what: str, where: str, started: bool) -> EngineError:
    """The error to raise for a server that ended by itself.

    `what`: "vLLM ended while starting"; `where`: what to say of its whole log; `started`: what it said last, before a death that came
    later, has nothing to do with it.
    """
    why = root_cause(lines) or ("" if started else last_words(lines))
    remedy = next((remedy for mark, remedy in REMEDIES if mark in why.lower()), "")
    told = f": {why.rstrip('.')}." if why else ", without a word: killed, perhaps for want of memory."
    return EngineError(f"{what}{told}{' ' + remedy if remedy else ''}{where}")


def _text(line: str) -> str:
    """A line without who said it, when, and at which level."""
    return STAMP.sub("", PREFIX.sub("", line)).strip()
