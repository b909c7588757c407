"""`rloo train` on a real terminal, a pseudo one: what it shows, and how it leaves it."""

from __future__ import annotations

import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rloo_cli.launch.local import terminal
from rloo_cli.run.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BEGINNING = ["-m", "rloo_cli", "train", "recipes/smoke.yaml"]


class OnTerminal:
    """A command whose controlling terminal is a pseudo one of 80×24."""

    def __init__(self, *arguments, **environment):
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        known = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, *BEGINNING, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**known, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment},
        )
        self.written = ""
        self.deadline = time.monotonic() + SECONDS

    def read(self):
        """Whether there was something to read."""
        if not select.select([self.ours], [], [], 0.1)[0]:
            return False
        self.written += os.read(self.ours, 65536).decode("utf-8", "replace")
        return True

    def until(self, text):
        while text not in self.written:
            self.read()
            assert self.process.poll() is None, self.written
            assert time.monotonic() < self.deadline, self.written[-3000:]

    def end(self):
        """The exit code, with all that was written read; the terminal is as it was."""
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < self.deadline, self.written[-3000:]
        while self.read():
            pass
        assert termios.tcgetattr(self.theirs) == self.before
        assert self.written.rfind("\x1b[?25h") >= self.written.rfind("\x1b[?25l")  # the cursor is there
        assert "\x1b[?1049h" not in self.written  # and no other screen was used
        return self.process.returncode

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def on_terminal():
    started = []

    def start(*arguments, **environment):
        started.append(OnTerminal(*arguments, **environment))
        return started[-1]

    yield start
    for command in started:
        command.close()


def plain(text):
    return ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def test_the_view_is_shown_and_taken_away(on_terminal, tmp_path):
    command = on_terminal("-o", str(tmp_path / "run"), "--set", "max_steps=25", "--set", "logging_steps=5", "--set", "eval_steps=20")
    assert command.end() == 0
    text = plain(command.written)
    assert re.search(r"\ndevice: cpu \(1 threads\), \w+, \w+, micro-batches of up to \d+ tokens\n", text)
    assert re.search(r"\nstep \d+/25  [━─]{24}  +\d+%  \ds, \d+s left", text)
    assert re.search(r"\nreward     -?\d\.\d{3}  [▁-█]+  ", text)
    assert re.search(r"\nstep took  \d\.\d\d s: generate \d", text)
    assert re.search(r"\nnow        \w+", text)
    assert re.search(r"\n── a completion of step \d+, reward \d\.\d{3} ─+\n", text)
    assert re.search(r"step 5/25 \| reward ", text)
    assert re.search(r"step 20/25 \| evaluation \| reward ", text)
    last = command.written.rpartition("\x1b[?2026l")[2]  # after the view is gone
    assert re.fullmatch(r"report: .*\n.*done: .*\n", plain(last).replace("\n ", " "), re.DOTALL)


def test_ctrl_c_leaves_the_terminal_and_the_way_on(on_terminal, tmp_path):
    command = on_terminal("-o", str(tmp_path / "run"), "--set", "max_steps=100000", "--set", "eval_strategy=no")
    command.until("a completion of step")
    os.write(command.ours, b"\x03")
    assert command.end() == 75
    text = plain(command.written)
    assert text.count("SIGINT: stopping, what was trained is saved; a second Ctrl-C leaves at once") == 1
    last = plain(command.written.rpartition("\x1b[?2026l")[2])
    assert re.match(r"stopped by SIGINT: step \d+ is saved, --resume goes on from there\.\n  rloo train recipes/smoke\.yaml ", last)


@pytest.mark.parametrize(("is_terminal", "ci", "is_live"), [(True, "", True), (True, "true", False), (False, "", False)])
def test_the_view_is_for_a_terminal_outside_of_continuous_integration(monkeypatch, is_terminal, ci, is_live):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys, "stdout", Stream())
    with Progress(1, console=terminal(quiet=False)) as progress:
        assert progress.is_live is is_live
