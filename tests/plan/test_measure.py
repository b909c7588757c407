from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.plan.projection import batch_seconds, measured_document, show_range, show_seconds
from rloo_cli.plan.resources import evaluations
from rloo_cli.recipe.batch import BatchPlan
from rloo_cli.recipe.load import load_recipe
from rloo_cli.training.measure import Batch, Measurement, _cut

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
FAST = ("--set", "max_completion_length=16", "--set", "max_train_samples=64", "--set", "eval_strategy=no", "--set", "eval_on_start=false")
BATCH = Batch(
    prompts=4,
    completions=32,
    tokens=320,
    truncated=0.25,
    generate=2.0,
    reward=0.5,
    train=4.0,
    sync=0.1,
    total=6.6,
    rows=32,
    skipped=0,
    rollout_bytes=1000,
)


def measurement(*batches: Batch, **changes) -> Measurement:
    return Measurement(
        **{"batches": batches, "batch_prompts": 4, "uses": 1, "overlaps": False, "load_seconds": 1.0, "peak_bytes": 1 << 20} | changes
    )


def test_a_whole_batch_is_projected_as_it_was_measured():
    found = measured_document(measurement(BATCH, replace(BATCH, generate=3.0)), total_steps=10, completion_max=16)
    assert found["step_seconds"] == {"low": pytest.approx(6.6), "high": pytest.approx(7.6)}
    assert found["run_seconds"] == {"low": pytest.approx(66), "high": pytest.approx(76)}
    assert (found["step_tokens"], found["mean_length"], found["rollout_bytes"]) == (320, 10, 10_000)


def test_a_part_of_a_batch_gives_a_range():
    found = measured_document(measurement(BATCH, batch_prompts=16), total_steps=10, completion_max=16)
    assert found["step_seconds"] == {"low": pytest.approx(2.5 + 16 + 0.1), "high": pytest.approx(10 + 16 + 0.1)}
    assert (found["step_tokens"], found["rollout_bytes"]) == (1280, 40_000)


def test_a_batch_that_serves_several_steps_is_shared_among_them():
    found = measured_document(measurement(BATCH, uses=2), total_steps=10, completion_max=None)
    assert found["step_seconds"]["low"] == pytest.approx(3.3)
    assert found["run_seconds"]["low"] == pytest.approx(33)


def test_overlap_costs_the_longer_of_the_two():
    assert batch_seconds(BATCH, 1, overlaps=True, is_upper=False) == pytest.approx(4.1)


def test_rows_without_gradient_are_counted_in_the_upper_end():
    half = replace(BATCH, skipped=16)
    assert batch_seconds(half, 1, overlaps=False, is_upper=False) == pytest.approx(6.6)
    assert batch_seconds(half, 1, overlaps=False, is_upper=True) == pytest.approx(10.6)


def test_seconds_are_told_in_their_unit():
    assert [show_seconds(s) for s in (0.001, 0.21, 3.14, 14, 210, 7560, 345_600)] == [
        "0 s",
        "0.21 s",
        "3.1 s",
        "14 s",
        "3.5 min",
        "2.1 h",
        "4.0 days",
    ]
    assert show_range({"low": 14.1, "high": 14.2}) == "14 s"


@pytest.mark.parametrize(("prompts", "k", "expected"), [(16, 1, 8), (4, 1, 4), (16, 4, 8), (24, 12, 12), (15, 3, 6)])
def test_the_small_batch_has_a_prompt_for_each_of_its_steps(prompts, k, expected):
    plan = BatchPlan(
        num_generations=8,
        prompts_per_step=prompts // k,
        completions_per_step=prompts // k * 8,
        prompts_per_generation=prompts,
        steps_per_generation_batch=k,
        num_iterations=1,
        off_policy=k > 1,
        max_micro_batch_rows=None,
    )
    cut = _cut(plan, 64)
    assert (cut.prompts_per_generation, cut.prompts_per_step * k, cut.completions_per_step) == (expected, expected, expected // k * 8)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_measuring_takes_true_steps_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(["plan", QUICKSTART, "--measure", "--json", *FAST]) == 0
    document = json.loads(capsys.readouterr().out)
    found = document["measured"]
    assert (found["prompts"], found["batch_prompts"]) == (16, 16)
    assert 0 < found["step_seconds"]["low"] <= found["step_seconds"]["high"]
    assert found["run_seconds"]["low"] == pytest.approx(80 * found["step_seconds"]["low"])
    assert 0 < found["mean_length"] <= 16
    assert found["tokens_per_batch"] == pytest.approx(found["mean_length"] * 128)
    assert files_below(tmp_path) == set()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_disk_is_what_a_run_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [*FAST, "--set", "max_steps=4", "--set", "save_steps=2"]
    assert exit_code_of(["plan", QUICKSTART, "--measure", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert exit_code_of(["train", QUICKSTART, "-q", "--output-dir", "run", *options]) == 0
    run, disk = tmp_path / "run", document["disk"]
    assert disk["count"] == len(list((run / "checkpoints").iterdir())) == 2
    assert disk["checkpoints"] == pytest.approx(size_of(run / "checkpoints"), rel=0.3)
    assert disk["final"] == pytest.approx(size_of(run / "final"), rel=0.3)
    assert document["measured"]["rollout_bytes"] == pytest.approx(size_of(run / "rollouts"), rel=0.3)
    assert size_of(run / "rollouts") <= disk["rollouts"]


def test_evaluations_are_counted_for_their_rollouts():
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml").recipe  # before the first step, and every 80
    assert [evaluations(recipe, steps, steps_per_epoch=10) for steps in (80, 81, 160)] == [2, 3, 3]
    by_epoch = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"eval_strategy": "epoch", "eval_on_start": False})}
    )
    assert evaluations(by_epoch, 25, steps_per_epoch=10) == 3


@pytest.mark.parametrize(
    "changes",
    [
        ("prompts_per_step=2", "steps_per_generation=2", "num_iterations=2"),
        ("dynamic_sampling=resample",),
        ("beta=0.05", "report_to=[tensorboard]"),
    ],
)
def test_every_kind_of_step_is_measured(changes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [word for change in changes for word in ("--set", change)]
    assert exit_code_of(["plan", QUICKSTART, "--measure", *FAST, *options]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "Measured here: " in out
    assert "  the run of 80 steps: " in out
    assert files_below(tmp_path) == set()


def test_all_rewards_equal_means_that_training_was_not_seen(tmp_path, monkeypatch, capsys):
    (tmp_path / "flat.py").write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        Path(QUICKSTART)
        .read_text()
        .replace("quickstart/", f"{ROOT}/recipes/quickstart/")
        .replace("quickstart.reward.correct_answer", "flat.score")
    )
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(["plan", str(recipe), "--measure", *FAST]) == 0, capsys.readouterr().err
    assert "what training takes is not in these figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--no-model"], "--measure needs the model that --no-model leaves out"),
        (["--engine"], "--engine and --measure each load the model: give one at a time."),
        (["--num-processes", "2"], "--measure takes its steps in this one process, and the run has 2: add --num-processes 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(options, told, capsys):
    assert exit_code_of(["plan", QUICKSTART, "--measure", *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, told in printed.err) == ("", True)


SLOW_REWARD = """import pathlib, time

def score(completions, **kwargs):
    pathlib.Path("called").touch()
    time.sleep(60)
    return [1.0 for _ in completions]
"""


def test_a_stop_leaves_nothing(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_REWARD.replace('"called"', repr(str(tmp_path / "called"))))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        Path(QUICKSTART)
        .read_text()
        .replace("quickstart/", f"{ROOT}/recipes/quickstart/")
        .replace("quickstart.reward.correct_answer", "slow.score")
    )
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "rloo_cli", "plan", str(recipe), "--measure", *FAST]
    process = subprocess.Popen(
        command, cwd=work, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "called").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "nothing is kept; run it again." in err
    assert files_below(work) == set()
