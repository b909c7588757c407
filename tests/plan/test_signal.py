from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.plan.signal import FEW, generations_for, share_with_signal

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("group", [2, 3, 5, 8])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_what_enumeration_gives(group, rate):
    exact = 0.0
    for outcome in product((0, 1), repeat=group):
        if len(set(outcome)) > 1:
            exact += rate ** sum(outcome) * (1 - rate) ** (group - sum(outcome))
    assert share_with_signal(rate, group) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("rate", [0.01, 0.03, 0.1])
def test_the_least_group_that_is_enough_is_told(rate):
    enough = generations_for(FEW, rate)
    assert share_with_signal(rate, enough) >= FEW > share_with_signal(rate, enough - 1)


@pytest.mark.parametrize(("mode", "told"), [("off", "`algorithm.dynamic_sampling: resample`"), ("resample", "as this recipe says")])
def test_a_plan_tells_how_many_groups_teach(mode, told, capsys):
    options = ["--no-model", "--set", f"dynamic_sampling={mode}"]
    assert exit_code_of(["plan", str(ROOT / "recipes/quickstart.yaml"), *options]) == 0
    out = capsys.readouterr().out
    assert "of 16 a step" in out
    assert "1 % of the time:  7.7 % of the groups, 1.2 a step" in out
    assert "at 1 % that is under a tenth: num_generations 11 reaches it" in out
    assert told in out


def test_large_groups_are_told_nothing_to_change(capsys):
    assert exit_code_of(["plan", str(ROOT / "recipes/quickstart.yaml"), "--no-model", "--set", "num_generations=16"]) == 0
    assert "under a tenth" not in capsys.readouterr().out
