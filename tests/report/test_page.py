from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from datetime import datetime
from html import unescape

import pytest
from hostile import MARK, TEXTS, write_hostile_run
from reading import read_page
from synthetic import group, write_rollout_steps, write_run, write_step

from rloo_cli.errors import RefusedError
from rloo_cli.report import page
from rloo_cli.report.page import render
from rloo_cli.report.run_view import view_runs
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.lock import locked

NOW = datetime(2026, 1, 31, 17, 45)
LIMIT = 5_000_000


def html_of(*folders) -> str:
    return render(view_runs(folders), now=NOW)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("healthy") / "mine")
    write_step(folder, 3, [*group(7, [1.0, 0.0]), *group(8, [0.0, 0.0])])
    return folder


@pytest.fixture(scope="module")
def healthy_html(healthy):
    return html_of(healthy)


@pytest.fixture(scope="module")
def hostile_html(tmp_path_factory):
    return html_of(write_hostile_run(tmp_path_factory.mktemp("hostile")))


def test_a_page_has_every_part(healthy_html):
    page = read_page(healthy_html)
    for part in (
        "Reward rose from",
        "No warnings.",
        "Health",
        "Curves",
        "Rollouts",
        "completions/mean_length",
        "learning_rate",
        "node-1",
        "c0ffee",
    ):
        assert part in page.text
    assert page.tags.count("svg") == page.tags.count("figure") > 10
    assert len(page.data["panels"]) == page.tags.count("figure")
    assert page.data["runs"][0]["steps"][0]["groups"][0]["c"][0]["t"] == "It is 0."


def test_a_page_loads_nothing(healthy_html):
    html = healthy_html
    assert {value for name, value in read_page(html).attributes if name in ("src", "href", "xlink:href") and not value.startswith("#")} == {
        "data:,"
    }
    without_names = re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", re.sub(r"<script.*?</script>", "", without_names, flags=re.DOTALL))
    assert "default-src 'none'" in unescape(html)


def test_the_policy_lets_the_pages_own_script_run_and_no_other(healthy_html):
    html = healthy_html
    script = read_page(html).scripts[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in unescape(html)


def test_what_is_hostile_stays_text(hostile_html, healthy_html):
    page, plain = read_page(hostile_html), read_page(healthy_html)
    assert len(page.scripts) == 2
    assert page.scripts[1] == plain.scripts[1]
    assert set(page.tags) <= set(plain.tags) | {"p"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert MARK in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]", hostile_html)


def test_hostile_completions_arrive_whole_but_for_what_a_reader_would_obey(hostile_html):
    (step,) = read_page(hostile_html).data["runs"][0]["steps"]
    texts = [each["c"][0]["t"] for each in step["groups"]]
    assert texts[:4] == TEXTS[:4]
    assert texts[4] == "\\x1b[2J\\x00\\x9b31m\\r\n    gone\\u202eevil\\u2066\\ufeff"


def test_several_runs_have_a_table_and_what_differs_first(undrawn, healthy, tmp_path):
    page = read_page(html_of(healthy, write_run(tmp_path / "theirs", steps=30)))
    assert "2 runs" in page.text
    assert [run["name"] for run in page.data["runs"]] == ["mine", "theirs"]
    assert page.text.index("training.max_steps") < page.text.index("model.model_name_or_path")


def test_a_run_under_way_is_told(undrawn, tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    with locked(RunFolder(folder).lock_file):
        assert "Still training, at step 20 of 20." in read_page(html_of(folder)).text
    assert "Not finished: it ended at step 20 of 20." in read_page(html_of(folder)).text


def test_why_a_run_ended_is_told(undrawn, tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    attempt = RunFolder(folder).attempt(1)
    attempt.mkdir(parents=True)
    (attempt / "rank-0.json").write_text(json.dumps({"rank": 0, "exit_code": 7, "reason": "step 21: metric loss is nan."}))
    assert "Not finished: it ended at step 20 of 20 (step 21: metric loss is nan)." in read_page(html_of(folder)).text


DAMAGE = {
    "no metrics": (lambda run: run.metrics.unlink(), "There is no metrics.jsonl"),
    "a broken line": (lambda run: run.metrics.open("a").write('{"step": 6'), "1 line of metrics.jsonl cannot be read."),
    "no recipe": (lambda run: run.recipe.unlink(), "recipe.yaml cannot be read."),
    "a recipe of another version": (lambda run: run.recipe.write_text("model: {}\nnew: 1\n"), "recipe.yaml cannot be read."),
    "a broken environment": (lambda run: run.environment.write_text("[" * 100_000), "environment.json cannot be read."),
    "a strange environment": (
        lambda run: run.environment.write_text('{"git": 1, "packages": [], "gpus": 3, "total_steps": "x", "command": {}}'),
        "",
    ),
    "no rollouts": (lambda run: run.rollout_file(3).unlink(), "There are no rollouts."),
    "broken rollouts": (lambda run: run.rollout_file(3).write_bytes(b"PAR1"), "not a readable rollout file"),
    "a broken tokenizer": (lambda run: (run.final.mkdir(), (run.final / "tokenizer.json").write_text("{")), ""),
    "a broken end": (lambda run: (run.attempt(1).mkdir(parents=True), (run.attempt(1) / "rank-0.json").write_text("{}")), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(damage, undrawn, tmp_path):
    folder = write_run(tmp_path / "run", steps=12)
    write_step(folder, 3, group(7, [1.0, 0.0]))
    do, told = DAMAGE[damage]
    do(RunFolder(folder))
    text = read_page(html_of(folder)).text
    assert told in text
    assert ("Reward rose" in text) == (damage != "no metrics")


def test_a_run_from_another_machine_shows_its_recipe(undrawn, tmp_path):
    folder = write_run(tmp_path / "run", steps=12)
    path = RunFolder(folder).recipe
    path.write_text(path.read_text().replace("some/model", "/not/here/model").replace("some/data", "/not/here/data.jsonl"))
    text = read_page(html_of(folder)).text
    assert "/not/here/data.jsonl" in text
    assert "cannot be read" not in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RefusedError, match="nothing to report yet"):
        html_of(tmp_path)
    with pytest.raises(RefusedError, match="no run folder"):
        html_of(tmp_path / "nowhere")


def test_a_long_run_makes_a_page_of_a_few_megabytes(tmp_path):
    folder = write_run(tmp_path / "run", steps=500)
    write_rollout_steps(folder, 500, every=50, words=200)
    html = html_of(folder)
    assert 200_000 < len(html.encode()) < LIMIT
    assert len(read_page(html).data["panels"][0]["lines"][0]["x"]) == 500


def test_incompressible_rollouts_do_not_make_the_page_large(undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BUDGET", 600_000)
    monkeypatch.setattr(page, "MOST_DATA", 100_000)
    folder, rng = write_run(tmp_path / "run", steps=12), random.Random(0)
    for step in range(1, 9):
        text = "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(8000))
        write_step(folder, step, [row for i in range(4) for row in group(i, [1.0, 0.0], completion=text + str(i))])
    small = read_page(html_of(folder))
    assert len(small.scripts[0]) <= 100_000 * 4 / 3 + 4
    assert len(small.data["runs"][0]["steps"]) == 8
