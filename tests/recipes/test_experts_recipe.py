"""The recipe of the rarer options, run to its end."""

import os
import subprocess
import sys
from pathlib import Path

from rloo_cli.recipe.load import load_recipe
from rloo_cli.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_does_what_its_comments_say(tmp_path):
    command = [sys.executable, "-m", "rloo_cli", "train", "recipes/experts.yaml", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["kl"] == 0 for row in rows] == [True, False, True, False]
    assert all(row["aux_loss"] > 0 and row["rows/skipped"] == 0 for row in rows)
    assert all(row["completions/max_length"] <= 16 for row in rows)
    generation = load_recipe(tmp_path / "run" / "recipe.yaml").recipe.generation
    assert (generation.max_completion_length, generation.top_k) == (16, 100)


def test_its_tokenizer_is_the_quickstarts_and_it_has_no_weights():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (ROOT / "recipes" / "experts" / "model" / name).read_bytes() == (
            ROOT / "recipes" / "quickstart" / "model" / name
        ).read_bytes()
    assert not list((ROOT / "recipes" / "experts").rglob("*.safetensors"))
