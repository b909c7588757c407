from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from rloo_cli.run.live_view import Sample
from rloo_cli.run.progress import LastingConsole, Progress

ROW = {
    "reward": 0.5,
    "completions/mean_length": 33.25,
    "perf/tokens_per_second": 1234.5,
    "kl": 0.01,
    "loss": -0.25,
    "grad_norm": 1.5,
}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def plain(clock, output, **options):
    console = Console(file=output, force_terminal=False, width=80)
    return Progress(10, console=console, clock=clock, **options)


def test_off_a_terminal_every_step_is_one_plain_line(clock):
    output = io.StringIO()
    with plain(clock, output, logging_steps=5) as progress:
        for step in (1, 2):
            clock.now += 4
            progress.step({"step": step, **ROW})
    assert output.getvalue() == (
        "step 1/10 | reward 0.500 | length 33.2 | tok/s 1234 | kl 0.0100 | loss -0.2500 | grad 1.500 | 36s left\n"
        "step 2/10 | reward 0.500 | length 33.2 | tok/s 1234 | kl 0.0100 | loss -0.2500 | grad 1.500 | 32s left\n"
    )


def test_what_is_absent_is_left_out_and_the_last_step_has_no_time_left(clock):
    output = io.StringIO()
    with plain(clock, output, start_step=9) as progress:
        progress.step({"step": 10, "reward": 1.0})
    assert output.getvalue() == "step 10/10 | reward 1.000\n"


def test_the_time_left_counts_only_this_attempts_steps(clock):
    progress = plain(clock, io.StringIO(), start_step=4)
    assert progress.seconds_left() is None
    clock.now += 3
    progress.step({"step": 5})
    assert progress.seconds_left() == 15


def test_a_sign_of_life_names_the_phase_and_for_how_long(clock):
    progress = plain(clock, io.StringIO())
    clock.now += 59
    with progress.phase("generate"):
        assert progress.heartbeat_line() is None
        clock.now += 1
        assert progress.heartbeat_line() == "step 0/10 | still in generate for 1s"
        with progress.phase("reward"):
            clock.now += 125
            assert progress.heartbeat_line() == "step 0/10 | still in reward for 2m 05s"
        assert progress.heartbeat_line() == "step 0/10 | still in generate for 2m 06s"


def test_the_heart_beats_by_itself_only_while_nothing_else_is_printed():
    output = io.StringIO()
    with Progress(10, console=Console(file=output, width=80), heartbeat_seconds=0.2) as progress, progress.phase("load the model"):
        for _ in range(8):
            progress.note("busy")
            time.sleep(0.05)
        assert "still" not in output.getvalue()
        deadline = time.monotonic() + 5
        while "still in load the model" not in output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "still in load the model" in output.getvalue()
    silent = output.getvalue()
    time.sleep(0.5)
    assert output.getvalue() == silent


def test_evaluations_and_notes_have_lines_of_their_own(clock):
    output = io.StringIO()
    with plain(clock, output) as progress:
        row = {"eval/rows/unscored": 0.0, "eval/reward": 0.75, "eval/rewards/right/mean": 0.5, "eval/rewards/right/std": 0.1}
        progress.evaluation({"step": 5, **row, "eval/rewards/right/pass@4": 1.0, "eval/prompts": 8.0, "perf/seconds/evaluate": 3.0})
        progress.note("[bold]a note, as it is[/bold] \x1b[2J")
    assert (
        output.getvalue()
        == "step 5/10 | evaluation | reward 0.7500 | right 0.5000 | right/pass@4 1.0000 | 8 prompts\n[bold]a note, as it is[/bold] \\x1b[2J\n"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_on_a_terminal_a_steps_line_has_what_fits(clock, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=10)
    progress = Progress(300, console=console, clock=clock)
    clock.now += 2
    progress.step({"step": 1, **ROW})
    (line,) = console.file.getvalue().splitlines()
    assert len(line) <= max(width, 24)
    assert line.startswith("step 1/300 ")
    assert line.endswith(" | 9m 58s left")
    if width == 80:
        assert line == "step 1/300 | reward 0.500 | length 33.2 | tok/s 1234 | kl 0.0100 | 9m 58s left"


def test_on_a_terminal_an_evaluations_line_has_what_fits(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=10)
    row = {"step": 5, "eval/reward": 0.75, "eval/rewards/right/mean": 0.5, "eval/prompts": 8.0}
    Progress(10, console=console, clock=clock).evaluation(row)
    assert console.file.getvalue() == "step 5/10 | evaluation | reward 0.7500 | right 0.5000\n"


def test_a_live_view_takes_the_consoles_messages_and_gives_them_back(clock):
    console = LastingConsole(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    with Progress(3, console=console, clock=clock, logging_steps=10) as progress:
        assert progress.is_live
        console.say("warning: said")
        with progress.phase("generate"):
            progress.step({"step": 1, "reward": 0.25}, Sample(step=1, prompt="2+2?", completion="4", reward=1.0))
            deadline = time.monotonic() + 20
            while "a completion of step 1" not in console.file.getvalue() and time.monotonic() < deadline:
                time.sleep(0.02)
    text = console.file.getvalue()
    assert text.index("warning: said") < text.index("step 1/3  ━━━━━━━━────────────────  33%")
    for part in ("reward     0.250  ▁  0.25 to 0.25", "now        generate 0s", "── a completion of step 1, reward 1.000 ──", "\n2+2?\n4"):
        assert part in text
    assert not progress.is_live
    console.say("after")
    assert console.file.getvalue().endswith("after\n")


@pytest.mark.parametrize("options", [{"force_terminal": False}, {"force_terminal": True, "force_interactive": False}])
def test_where_nobody_looks_there_is_no_live_view(clock, options):
    console = Console(file=io.StringIO(), width=80, height=24, **options)
    with Progress(3, console=console, clock=clock) as progress:
        assert not progress.is_live
        progress.step({"step": 1, "reward": 0.5})
    assert console.file.getvalue() == "step 1/3 | reward 0.500 | 0s left\n"


def test_on_a_terminal_lines_stay_every_logging_steps(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=10)
    with Progress(7, console=console, clock=clock, logging_steps=3) as progress:
        for step in range(1, 8):
            progress.step({"step": step, "reward": 0.5})
    lines = re.findall(r"step \d/7 \| reward 0\.500[^\n\x1b]*\n", console.file.getvalue())
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]


def test_a_dumb_terminal_gets_plain_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    with Progress(3, console=console, clock=clock, logging_steps=10) as progress:
        progress.step({"step": 1, "reward": 0.5})
    assert console.file.getvalue() == "step 1/3 | reward 0.500 | 0s left\n"


def test_closing_twice_is_fine(clock):
    progress = plain(clock, io.StringIO())
    with progress:
        progress.close()
    progress.close()


def test_output_that_cannot_be_written_does_not_end_the_run(clock, caplog):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with plain(clock, Full()) as progress:
        progress.step({"step": 1})
        progress.step({"step": 2})
    assert caplog.text.count("No space left") == 1


PIPED = """
import sys
from rloo_cli.run.progress import Progress
with Progress(2000) as progress:
    for step in range(1, 2001):
        progress.step({"step": step})
print("done", file=sys.stderr)
"""


def test_a_reader_that_goes_away_does_not_end_the_run():
    process = subprocess.Popen([sys.executable, "-c", PIPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout.readline().startswith("step 1/2000")
    process.stdout.close()
    assert process.stderr.read() == "done\n"
    assert process.wait() == 0


def test_what_came_before_a_step_is_not_in_the_time_left(clock):
    progress = Progress(10, console=Console(file=io.StringIO()), clock=clock)
    clock.now += 500
    progress.step({"step": 1, "perf/seconds/step": 2.0})
    assert progress.seconds_left() == 18
