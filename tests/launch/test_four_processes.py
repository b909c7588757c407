"""Whole runs of four processes, with a reference model and each batch used twice: the metrics of one process."""

from __future__ import annotations

import math

import pytest
from test_several_processes import TOLERANCE, arguments, rows, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = ["max_steps=5", "save_steps=5", "eval_steps=5", "beta=0.05", "num_iterations=2"]
ROUNDING = 1e-6
"""Absolute: means of terms that cancel, which are nothing but rounding."""


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The metrics of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    done = run(arguments(folder, settings=SETTINGS))
    assert done.returncode == 0, done.stderr
    return rows(folder)


def differences(ours, theirs):
    """(relative difference, step, metric) of all that differ by more than rounding, the largest first."""
    found = [
        (abs(row[name] - value) / max(abs(value), ROUNDING), row["step"], name)
        for row, expected in zip(ours, theirs, strict=True)
        for name, value in expected.items()
        if not math.isclose(row[name], value, rel_tol=0, abs_tol=ROUNDING)
    ]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_four_processes_end_with_the_metrics_of_one(strategy, one, tmp_path):
    done = run(arguments(tmp_path / "four", "--num-processes", "4", "--accelerate-config", strategy, settings=SETTINGS))
    assert done.returncode == 0, done.stderr
    four = rows(tmp_path / "four")
    assert [row.keys() for row in four] == [row.keys() for row in one]
    assert len([row for row in four if "loss" in row]) == 5
    found = differences(four, one)
    print(strategy, *found[:3], sep="\n")
    assert not [difference for difference in found if difference[0] > TOLERANCE]
