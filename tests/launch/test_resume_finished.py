"""A run that came to its end, and a recipe that says something else now."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONSTANT = ["--set", "lr_scheduler_type=constant"]


def train(folder, *arguments):
    command = [sys.executable, "-m", "rloo_cli", "train", str(ROOT / "recipes" / "smoke.yaml"), "--output-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = train(folder, *CONSTANT)
    assert done.returncode == 0, done.stderr
    return folder


def resume(folder, how, *settings):
    return exit_code_of(["train", str(ROOT / "recipes" / "smoke.yaml"), "--output-dir", str(folder), how, *settings])


@pytest.mark.parametrize("how", ["--resume", "--resume=auto"])
@pytest.mark.parametrize("settings", [[], ["--set", "save_steps=7"], ["--set", "max_steps=1"]])
def test_nothing_is_left_to_do(finished, capsys, how, settings):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert resume(finished, how, *CONSTANT, *settings) == 0
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.parametrize("how", ["--resume", "--resume=auto"])
def test_a_change_that_matters_is_refused(finished, capsys, how):
    assert resume(finished, how, *CONSTANT, "--set", "learning_rate=0.5") == 2
    assert "training.learning_rate: 0.001 in the run, 0.5 now" in capsys.readouterr().err
    assert resume(finished, how) == 2
    assert "training.lr_scheduler_type" in capsys.readouterr().err


def test_another_model_behind_the_same_name_is_refused(finished, tmp_path):
    """Other shapes or weights: the run began with another."""
    recipe = (ROOT / "recipes" / "smoke.yaml").read_text()
    for name in ("model", "prompts.jsonl", "reward.py"):
        (tmp_path / "smoke").mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / "recipes" / "smoke" / name), str(tmp_path / "smoke")], check=True)
    (tmp_path / "smoke.yaml").write_text(recipe)
    command = [sys.executable, "-m", "rloo_cli", "train", str(tmp_path / "smoke.yaml"), "--output-dir", str(tmp_path / "run"), *CONSTANT]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    config = tmp_path / "smoke" / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 96}))
    done = subprocess.run([*command, "--resume", "--set", "max_steps=4"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "is not the model that" in done.stderr


def test_a_longer_run_goes_on_and_one_that_was_cut_short_is_not_called_finished(finished):
    done = train(finished, *CONSTANT, "--resume=auto", "--set", "max_steps=4")
    assert done.returncode == 0, done.stderr
    assert "from the checkpoint of step 2" in done.stdout
    assert [row["step"] for row in read_metrics(finished / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]
    assert json.loads((finished / "final" / "manifest.json").read_text())["info"]["step"] == 4
