from __future__ import annotations

import errno
import io
import logging
import sys
import threading
import time

import pytest
from rich.console import Console
from rich.text import Text

from rloo_cli.run import live
from rloo_cli.run.live import LiveArea


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(live, "SECONDS_BETWEEN_FRAMES", 0.01)
    return Terminal()


def area(terminal, lines=("one", "two"), **options):
    console = Console(file=terminal, force_terminal=True, width=80, height=24, color_system=None)
    return LiveArea(console, lambda width, height: [Text(line) for line in lines], **options)


def until(terminal, text, *, times=1, after=0):
    deadline = time.monotonic() + 20
    while terminal.getvalue()[after:].count(text) < times:
        assert time.monotonic() < deadline, terminal.getvalue()[-500:]
        time.sleep(0.01)


def screen(written):
    """What stands on a terminal of unlimited size after these bytes: of what a LiveArea writes."""
    for mark in (live.TOGETHER, live.SHOWN):
        written = written.replace(mark, "")
    rows, row, column, i = [""], 0, 0, 0
    while i < len(written):
        if written[i] == "\r":
            column = 0
        elif written[i] == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif written[i : i + 2] == "\x1b[":
            end = next(j for j in range(i + 2, len(written)) if written[j].isalpha())
            count, order = written[i + 2 : end], written[end]
            if order == "A":
                row -= int(count)
            else:
                assert order == "J", order
                assert column == 0
                rows = [*rows[:row], ""]
            i = end
        else:
            rows[row] = rows[row][:column] + written[i] + rows[row][column + 1 :]
            column += 1
        i += 1
    return rows


def test_lines_are_drawn_in_place_and_taken_away_at_the_end(terminal):
    view = area(terminal)
    view.start()
    until(terminal, "two", times=3)
    assert screen(terminal.getvalue().rpartition(live.SHOWN)[0]) == ["one", "two"]
    view.stop()
    assert screen(terminal.getvalue()) == [""]
    view.stop()


def test_what_is_said_and_printed_stands_above_in_its_order(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    view = area(terminal)
    view.start()
    until(terminal, "two")
    view.say("a warning \x1b[2J")
    print("printed")
    print("bar 10%\rbar 99%")
    print("\x1b[32mgreen\x1b[0m", end=" ")
    sys.stdout.writelines(["and ", "on\n", "rest"])
    until(terminal, "and on")
    assert screen(terminal.getvalue().rpartition(live.SHOWN)[0])[-2:] == ["one", "two"]
    view.stop()
    assert screen(terminal.getvalue()) == ["a warning \\x1b[2J", "printed", "bar 99%", "green and on", "rest", ""]


def test_the_streams_are_given_back_and_one_that_was_kept_goes_on(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    view = area(terminal)
    view.start()
    kept = sys.stdout
    assert kept is not terminal
    assert kept.isatty()
    view.stop()
    assert sys.stdout is terminal
    kept.write("late\n")
    assert terminal.getvalue().endswith("late\n")


def test_a_stream_that_is_no_terminal_is_left_alone(monkeypatch, terminal):
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    view = area(terminal)
    view.start()
    print("into the file", file=sys.stderr)
    view.stop()
    assert error.getvalue() == "into the file\n"


def test_a_terminal_that_takes_nothing_keeps_nobody_waiting(monkeypatch):
    free = threading.Event()

    class Stuck(Terminal):
        def write(self, text):
            free.wait(30)
            return super().write(text)

    monkeypatch.setattr(live, "SECONDS_BETWEEN_FRAMES", 0.01)
    stuck = Stuck()
    view = area(stuck)
    view.start()
    time.sleep(0.1)
    for i in range(1000):
        view.say(f"message {i}")
    assert not free.is_set()  # nothing was waited for
    free.set()
    view.stop()
    assert screen(stuck.getvalue())[-2] == "message 999"


def test_a_terminal_that_is_gone_is_told_to_the_log(monkeypatch, caplog):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(live, "SECONDS_BETWEEN_FRAMES", 0.01)
    view = area(Gone())
    with caplog.at_level(logging.WARNING):
        view.start()
        view._thread.join(20)
        view.stop()
    assert caplog.text.count("nothing more is shown") == 1


def test_lines_that_folded_on_a_terminal_made_narrower_are_counted(terminal):
    view = area(terminal, lines=["x" * 70, "y" * 10])
    view.start()
    until(terminal, "y" * 10)
    view._console.width = 30
    mark = len(terminal.getvalue())
    until(terminal, "\r\x1b[3A\x1b[J", after=mark)  # 3 rows of x, one of y
    view.stop()
