"""The LoRA recipe learns, with its real engine and reward workers, and its adapter becomes a model that answers as well."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.launch.talk import Speaker, choose_subject

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[{"role": "user", "content": f"What is {a}+{b}+{c}?"}] for a, b, c in ((12, 30, 25), (11, 22, 33))]


def answers(subject):
    speaker = Speaker(choose_subject(str(subject), checkpoint=None), seed=0, trust_remote_code=False)
    params = {"max_new_tokens": 40, "temperature": 0.0}
    return [answer.completions[0].text for answer in speaker.answer(PROMPTS, type(speaker.params())(**params), 1)]


@pytest.mark.timeout(900)  # half a minute on a core of its own
def test_the_recipe_learns_and_what_it_learnt_survives_the_merge(tmp_path):
    run = tmp_path / "run"
    changes = ("max_steps=10", "eval_steps=10", "max_eval_samples=64", "save_steps=10")
    command = [sys.executable, "-m", "rloo_cli", "train", "recipes/lora.yaml", "--output-dir", str(run), "-q"]
    command += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval/reward"] for row in rows if "eval/reward" in row)
    assert before < 0.2
    assert after > 0.4
    assert rows[1]["kl"] == 0
    assert exit_code_of(["export", "--merge", str(run), str(tmp_path / "merged")]) == 0
    assert answers(run) == answers(tmp_path / "merged")
