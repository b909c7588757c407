from __future__ import annotations

import re

import pytest
from synthetic import write_run

from rloo_cli.report.curves import draw
from rloo_cli.report.panels import make_panels
from rloo_cli.report.run_view import view_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, steps=steps, seed=steps) for name, steps in (("first", 60), ("second", 40))]


def panels_by_title(folders):
    return {panel.title: panel for panel in make_panels(view_runs(folders)).drawn}


def test_a_run_has_its_curves_and_what_never_changes_is_told(runs):
    made = make_panels(view_runs(runs[:1]))
    titles = [panel.title for panel in made.drawn]
    assert titles[:4] == ["reward", "rewards/…/mean", "completions/mean_length", "completions/clipped_ratio"]
    assert {"entropy", "kl", "grad_norm", "groups/zero_std", "sampling/logp_diff_mean", "perf/seconds/…", "perf/tokens_per_second"} <= {
        *titles
    }
    assert dict(made.constants)["clip_ratio/region_mean"] == "0"
    assert "clip_ratio/region_mean" not in titles


def test_the_reward_has_its_evaluations_and_the_length_its_range(runs):
    panels = panels_by_title(runs[:1])
    assert [(line.label, line.style) for line in panels["reward"].lines] == [("training", "line"), ("evaluation", "points")]
    assert panels["completions/mean_length"].lines[0].low is not None
    assert re.fullmatch(r"0\.\d+ → 0\.\d+", panels["reward"].summary)
    assert panels["groups/zero_std"].summary.endswith(" %")


def test_functions_and_phases_of_one_run_share_a_panel(runs):
    panels = panels_by_title(runs[:1])
    assert [line.label for line in panels["rewards/…/mean"].lines] == ["correct", "style"]
    phases = panels["perf/seconds/…"].lines
    assert [(line.label, line.style) for line in phases] == [(name, "area") for name in ("generate", "reward", "train", "sync")]


def test_several_runs_lie_over_each_other(runs):
    panels = panels_by_title(runs)
    assert [line.label for line in panels["entropy"].lines] == ["first", "second"]
    assert [line.color for line in panels["reward"].lines] == [0, 0, 1, 1]
    assert len(panels["rewards/correct/mean"].lines) == len(panels["perf/seconds/train"].lines) == 2
    assert panels["entropy"].lines[0].low is None
    assert not any("…" in title for title in panels)


def test_a_single_function_is_not_drawn_twice(tmp_path):
    nothing = {"rewards/style/mean": lambda t: None}
    folder = write_run(tmp_path / "run", changed=nothing)
    assert "rewards/…/mean" not in panels_by_title([folder])


def test_a_picture_is_text_and_the_pages_colours(runs):
    svg = draw(panels_by_title(runs[:1])["reward"]).svg
    assert svg.startswith("<svg ")
    assert re.findall(r"<text[^>]*>(\d[^<]*)</text>", svg)
    assert "var(--line-0)" in svg
    assert "var(--line-1)" in svg
    assert not re.search(r"#0000|<style|<metadata|<!--|\bid=\"(?![pm])|href=\"(?!#)|font-family", svg)


def test_each_panel_of_every_kind_can_be_drawn(runs, tmp_path):
    single = write_run(tmp_path / "one-step", steps=1, evaluations=(0.5,))
    for folders in (runs, runs[:1], [single]):
        for panel in make_panels(view_runs(folders)).drawn[:6]:
            drawing = draw(panel)
            assert drawing.x_limits[0] < drawing.x_limits[1]
            assert len(drawing.svg) < 60_000


def test_one_step_far_out_does_not_set_the_scale(tmp_path):
    folder = write_run(tmp_path / "run", changed={"grad_norm": lambda t: 5000.0 if t == 1.0 else 0.5 + t / 10})
    labels = re.findall(r"text-anchor: end[^>]*>([^<]*)</text>", draw(panels_by_title([folder])["grad_norm"]).svg)
    assert labels[-1] in ("0.5", "0.6", "0.75", "1")
