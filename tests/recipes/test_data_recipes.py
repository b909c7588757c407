"""The recipes of reward models, streams and mixtures, run for two steps as a user would, and looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["max_steps=2", "prompts_per_step=2", "num_generations=4", "max_eval_samples=4", "eval_steps=2", "threads=1"]


def rloo(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rloo_cli", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )


def rows_of(name, tmp_path):
    overrides = [word for value in SHORT for word in ("--set", value)]
    done = rloo("train", f"recipes/{name}.yaml", "--output-dir", str(tmp_path / "run"), "--quiet", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["reward-model", "streaming", "mixture"])
def test_the_recipe_runs(name, tmp_path):
    rows = rows_of(name, tmp_path)
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert any("eval/reward" in row for row in rows)
    if name == "reward-model":
        assert all("rewards/score/mean" in row and row["custom/score/truncated"] == 0.0 for row in steps)
        assert all("rewards/correct_answer/mean" in row for row in steps)
    assert all(("epoch" in row) == (name != "streaming") for row in steps)


def test_plan_knows_the_reward_model(tmp_path):
    done = rloo("plan", "recipes/reward-model.yaml", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["memory"]["bytes"]["reward models"] == pytest.approx(879336, rel=0.01)
    assert [reward["is_model"] for reward in document["rewards"]] == [True, False]


def test_a_reward_model_can_be_tried_on_the_data():
    done = rloo("rewards", "check", "recipes/reward-model.yaml", "--json")
    assert done.returncode in (0, 4), done.stderr
    assert "score" in done.stdout
