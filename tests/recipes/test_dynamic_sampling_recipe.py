"""The recipe of dynamic sampling, run for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

from rloo_cli.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_fills_its_batches_and_counts_what_it_left_out(tmp_path):
    settings = [word for setting in ("max_steps=5", "eval_on_start=false", "eval_strategy=no", "seed=3") for word in ("--set", setting)]
    command = [sys.executable, "-m", "rloo_cli", "train", "recipes/dynamic-sampling.yaml", "--output-dir", str(tmp_path / "run"), *settings]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    dropped = [row["groups/dropped"] for row in rows]
    assert sum(dropped) > 0
    assert all(row["groups/missing"] == 0 for row in rows)
    drawn = [round(row["epoch"] * 2048) for row in rows]
    assert drawn == [16 * step + sum(dropped[:step]) for step in range(1, 6)]
