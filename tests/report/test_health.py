from __future__ import annotations

import math
import random

import pytest
from synthetic import write_run

from rloo_cli.report.health import CHECKS, Level, checks_table, examine
from rloo_cli.report.run_view import view_runs
from rloo_cli.report.verdict import verdict

RNG = random.Random(0)


def levels(folder) -> dict[str, Level]:
    return {finding.check.title: finding.level for finding in examine(view_runs([folder])[0])}


def troubled(folder, **run) -> dict[str, Level]:
    """What is told about a run with these courses or evaluations."""
    return {title: level for title, level in levels(write_run(folder, **run)).items() if level is not Level.FINE}


def test_a_healthy_run_passes_every_check_that_applies(tmp_path):
    found = levels(write_run(tmp_path / "run"))
    assert set(found.values()) == {Level.FINE}
    not_measured = {check.title for check in CHECKS} - set(found)
    assert not_measured == {"ratios clipped"}  # on-policy


CASES = {
    "reward does not rise": (
        {"reward": lambda t: 0.5 + RNG.gauss(0, 0.02)},
        {"reward": lambda t: 0.5 - 0.3 * t + RNG.gauss(0, 0.02)},
    ),
    "entropy collapse": ({"entropy": lambda t: 0.5 * math.exp(-1.8 * t)}, {"entropy": lambda t: 0.5 * math.exp(-4 * t)}),
    "groups without signal": ({"groups/zero_std": lambda t: 0.6 * t + 0.05}, {"groups/zero_std": lambda t: 0.95}),
    "unscored completions": ({"rows/unscored": lambda t: 12.0}, {"rows/unscored": lambda t: 64.0}),
    "truncation": ({"completions/clipped_ratio": lambda t: 0.2 * t}, {"completions/clipped_ratio": lambda t: 0.5}),
    "length drift": ({"completions/mean_length": lambda t: 100 + 150 * t}, {"completions/mean_length": lambda t: 300 - 280 * t}),
    "ratios clipped": ({"clip_ratio/region_mean": lambda t: 0.3}, {"clip_ratio/region_mean": lambda t: 0.7 * t + 0.1}),
    "gradient spikes": ({"grad_norm": lambda t: 15.0 if t == 1.0 else 0.6}, {"grad_norm": lambda t: 150.0 if t == 1.0 else 0.6}),
    "far from the reference": ({"kl": lambda t: 0.3 * t}, {"kl": lambda t: 2 * t}),
    "sampler and trainer differ": ({"sampling/logp_diff_mean": lambda t: 0.05}, {"sampling/logp_diff_mean": lambda t: 0.2}),
    "mismatch grows": ({"sampling/logp_diff_mean": lambda t: 0.004 + 0.008 * t}, {"sampling/logp_diff_mean": lambda t: 0.002 + 0.02 * t}),
    "few effective samples": ({"sampling/ess": lambda t: 0.95 - 0.2 * t}, {"sampling/ess": lambda t: 0.99 - 0.9 * t}),
}


@pytest.mark.parametrize("title", CASES)
def test_a_check_tells_its_trouble_and_no_other_does(title, tmp_path):
    note, warning = CASES[title]
    assert troubled(tmp_path / "note", changed=note) == {title: Level.NOTE}
    assert troubled(tmp_path / "warning", changed=warning) == {title: Level.WARNING}


def test_gradients_that_are_always_clipped_are_a_note(tmp_path):
    assert troubled(tmp_path / "run", changed={"grad_norm": lambda t: 9 + t}) == {"gradients clipped": Level.NOTE}


def test_an_evaluation_below_its_best_is_told_by_its_standard_error(tmp_path):
    # 0.4 / √400 = 0.02, of a difference 0.028
    assert troubled(tmp_path / "fine", evaluations=(0.2, 0.8, 0.76)) == {}
    assert troubled(tmp_path / "note", evaluations=(0.2, 0.8, 0.73)) == {"evaluation below its best": Level.NOTE}
    assert troubled(tmp_path / "warning", evaluations=(0.2, 0.8, 0.6)) == {"evaluation below its best": Level.WARNING}


def test_every_check_has_a_case():
    assert {check.title for check in CHECKS} == {*CASES, "gradients clipped", "evaluation below its best"}


def test_a_mismatch_that_is_rounding_may_grow(tmp_path):
    assert troubled(tmp_path / "run", changed={"sampling/logp_diff_mean": lambda t: 1e-7 + 1e-5 * t}) == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.title)
def test_a_limit_belongs_to_what_it_limits(check):
    inside = math.nextafter(check.note, -math.inf if check.side == "above" else math.inf)
    assert [check.level(value) for value in (inside, check.note)] == [Level.FINE, Level.NOTE]
    if math.isfinite(check.warning):
        assert check.level(check.warning) is Level.WARNING


def test_a_short_run_is_not_judged(tmp_path):
    view = view_runs([write_run(tmp_path / "run", steps=9, evaluations=())])[0]
    assert examine(view) == []
    assert verdict(view, [])[-1] == "Fewer than 10 steps: too few to judge its health."


def test_the_worst_comes_first_and_the_verdict_counts(tmp_path):
    changed = {"grad_norm": lambda t: 9 + t, "completions/clipped_ratio": lambda t: 0.5}
    view = view_runs([write_run(tmp_path / "run", changed=changed)])[0]
    findings = examine(view)
    assert [finding.check.title for finding in findings[:2]] == ["truncation", "gradients clipped"]
    assert findings[0].detail == "50 % at the beginning, 50 % at the end, limit 512 tokens"
    sentences = verdict(view, findings)
    assert sentences[0] == "Not finished: it ended at step 60 of 60."
    assert sentences[1].startswith("Reward rose from 0.2")
    assert sentences[2:] == [
        "Evaluation on 400 prompts: 0.200 after step 0, 0.800 after step 60.",
        "1 warning (truncation), and 1 note.",
    ]


def test_the_table_of_checks_names_every_limit():
    table = {row[0]: row[2:4] for row in checks_table()}
    assert table["entropy collapse"] == ("≤ 25 %", "≤ 10 %")
    assert table["gradients clipped"] == ("≥ 90 %", "never")
