from __future__ import annotations

import dataclasses
import doctest

import pytest
from rich.cells import cell_len

from rloo_cli.run import live_view
from rloo_cli.run.live_view import Sample, Shown, evaluation_values, format_seconds, sparkline, step_values, view_lines

ROW = {
    "step": 12,
    "reward": 0.5,
    "completions/mean_length": 33.25,
    "perf/tokens_per_second": 1234.5,
    "kl": 0.01,
    "loss": -0.25,
    "grad_norm": 1.5,
    "perf/seconds/step": 2.5,
    "perf/seconds/train": 1.25,
    "perf/seconds/generate": 1.0,
    "perf/seconds/reward": 0.125,
    "perf/seconds/sync": 0.01,
}
SHOWN = Shown(
    step=12,
    total=40,
    elapsed=65,
    left=150,
    row=ROW,
    rewards=(0.25, 0.75, 0.5),
    evaluation={"step": 10, "eval/reward": 0.75, "eval/rewards/right/mean": 0.5, "eval/prompts": 8.0},
    sample=Sample(step=12, prompt="<|user|>\nWhat is 1+1?\n<|assistant|>", completion="It is\n\x1b[2J2.\n", reward=1.0),
    phase="generate",
    phase_seconds=7.9,
)


def plain(shown, width=79, height=23):
    return [line.plain for line in view_lines(shown, width=width, height=height)]


def test_the_view_has_every_part():
    rule = "── a completion of step 12, reward 1.000 "
    assert plain(SHOWN) == [
        "step 12/40  ━━━━━━━─────────────────  30%  1m 05s, 2m 30s left",
        "reward     0.500  ▁█▄  0.25 to 0.75",
        "           length 33.2 | tok/s 1234 | kl 0.0100 | loss -0.2500 | grad 1.500",
        "step took  2.50 s: generate 1.00 reward 0.12 train 1.25 sync 0.01",
        "evaluation step 10: reward 0.7500 | right 0.5000 | 8 prompts",
        "now        generate 7s",
        rule + "─" * (79 - len(rule)),
        "<|user|>⏎What is 1+1?⏎<|assistant|>",
        "It is⏎\\x1b[2J2.",
    ]


def test_before_the_first_step_there_is_the_phase():
    start = dataclasses.replace(SHOWN, step=0, left=None, row={}, rewards=(), evaluation={}, sample=None, phase="load model")
    assert plain(start) == ["step 0/40  ────────────────────────   0%  1m 05s", "now        load model 7s"]


def test_an_evaluation_by_itself_has_no_steps():
    start = dataclasses.replace(SHOWN, total=0, left=None, row={}, rewards=(), evaluation={}, sample=None, phase="evaluate")
    assert plain(start) == ["1m 05s", "now        evaluate 7s"]


LONG = Sample(step=1, prompt="你好 prompt \x07" * 500, completion="wörter 你好吗 \x1b[31m\u202e" * 500, reward=None)


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 79, 100, 139])
@pytest.mark.parametrize("height", [1, 2, 4, 7, 9, 11, 23, 39])
def test_nothing_is_wider_or_higher_than_the_terminal(width, height):
    lines = plain(dataclasses.replace(SHOWN, sample=LONG), width, height)
    assert 1 <= len(lines) <= height
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)
    if width >= 20:
        assert lines[0].startswith("step 12/40")


def test_a_low_terminal_keeps_what_tells_most():
    assert [line.split()[0] for line in plain(SHOWN, height=3)] == ["step", "reward", "now"]


def test_of_a_prompt_the_end_is_seen_and_of_a_completion_the_beginning():
    sample = Sample(step=1, prompt="begin " + "x" * 500 + " end", completion="first " + "y" * 1000 + " last", reward=None)
    _, prompt, *completion = plain(dataclasses.replace(SHOWN, sample=sample))[6:]
    assert (prompt[:2], prompt[-5:], len(prompt)) == ("…x", "x end", 79)
    assert len(completion) == 6
    assert completion[0].startswith("first yy")
    assert completion[-1].endswith("y…")


def test_an_empty_completion_is_called_so():
    assert plain(dataclasses.replace(SHOWN, sample=Sample(step=1, prompt="p", completion="\n", reward=0.0)))[-1] == "(empty)"


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([0.5], 5, "▁"),
        ([1.0, 1.0], 5, "▁▁"),
        ([0, 0, 1, 1], 2, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([-1.0, 1.0], 0, ""),
    ],
)
def test_sparklines(values, width, bars):
    assert sparkline(values, width) == bars


def test_values_that_do_not_fit_are_left_out_from_the_end():
    assert step_values(ROW, 30) == "reward 0.500 | length 33.2"
    assert step_values(ROW, 5) == ""
    assert evaluation_values(SHOWN.evaluation, 20) == "reward 0.7500"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (7500, "2h 05m")])
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_the_examples_are_true():
    assert doctest.testmod(live_view).failed == 0
