from __future__ import annotations

import doctest
import importlib
import json
import math

import pytest

from rloo_cli.inspect.metric_rows import read_metric_rows
from rloo_cli.inspect.series import Series, sparkline


@pytest.mark.parametrize("module", ["series", "run_state", "words"])
def test_examples(module):
    tested = doctest.testmod(importlib.import_module(f"rloo_cli.inspect.{module}"))
    assert tested.attempted
    assert not tested.failed


def test_training_and_evaluation_rows_are_told_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 1, "eval/reward": 0.25}\n{"step": 2, "kl": 0.1}\n')
    metrics = read_metric_rows(path)
    assert metrics.series("reward") == Series((1.0,), (0.5,))
    assert metrics.series("kl") == Series((2.0,), (0.1,))
    assert metrics.series("eval/reward") == Series((1.0,), (0.25,))
    assert (metrics.last_step, metrics.damaged_lines) == (2, 0)


def test_what_cannot_be_read_is_counted_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        '{"step": 1, "reward": 0.5}',
        "[1]",
        "{",
        '{"reward": 1.0}',
        "[" * 100_000,
        '{"step": 2, "reward": NaN, "kl": 1e999, "loss": "x"}',
    ]
    path.write_bytes("\n".join(rows).encode() + b"\n\xff\xfe\n\n")
    metrics = read_metric_rows(path)
    assert metrics.damaged_lines == 5
    assert [dict(row) for row in metrics.train] == [{"step": 1.0, "reward": 0.5}, {"step": 2.0}]


def test_no_metrics_are_no_rows(tmp_path):
    assert read_metric_rows(tmp_path / "metrics.jsonl").train == ()


def test_of_two_rows_of_a_step_the_later_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "reward": reward}) + "\n" for step, reward in ((1, 0.1), (2, 0.2), (1, 0.3))))
    assert read_metric_rows(path).series("reward") == Series((1.0, 2.0), (0.3, 0.2))


def test_metrics_are_read_as_far_as_they_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 2, "reward": 1}',
        '{"step": 1, "reward": 3}',
        '{"step": 2, "reward": 5}',
        '{"step": 3, "reward": NaN}',
        "{",
        "7",
        '{"a": 1}',
    ]
    path.write_text("\n".join([*lines, '{"step": 2, "eval/reward": 0.5}', '{"step": 4, "rew']))
    rows = read_metric_rows(path)
    assert rows.series("reward") == Series((1.0, 2.0), (3.0, 5.0))
    assert rows.series("eval/reward") == Series((2.0,), (0.5,))
    assert (rows.last_step, rows.damaged_lines) == (3, 4)
    assert rows.series("reward").best() == (2, 5.0)
    assert rows.series("reward").best(greater=False) == (1, 3.0)
    assert rows.series("nothing").best() is None


def test_beginning_and_end_are_a_tenth_each():
    series = Series(tuple(range(100)), tuple(float(value) for value in range(100)))
    assert (series.head, series.tail) == (4.5, 94.5)


def test_thinning_keeps_means_and_order():
    long = Series(tuple(range(2000)), tuple(float(value) for value in range(2000)))
    thin = long.thinned(500)
    assert len(thin.steps) == 500
    assert thin.values[:2] == (1.5, 5.5)
    assert long.thinned(2000) is long


def test_smoothing_is_a_mean_of_neighbours_that_keeps_a_line():
    line = Series(tuple(range(100)), tuple(2.0 * step for step in range(100)))
    smooth = line.smoothed()
    assert smooth.values[2:-2] == pytest.approx(line.values[2:-2])
    noisy = Series(tuple(range(100)), tuple(float(step % 2) for step in range(100)))
    assert max(abs(value - 0.5) for value in noisy.smoothed().values[2:-2]) == pytest.approx(0.1)
    assert not any(map(math.isnan, noisy.smoothed().values))


def test_a_curve_as_bars():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([]) == ""
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
