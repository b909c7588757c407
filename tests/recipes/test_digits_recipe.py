"""recipes/digits.yaml: what is embedded is what it says, and a shorter run reads digits it could not read before."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDER = RECIPES / "digits"


def rows_of(split):
    return pq.read_table(FOLDER / "data" / f"{split}.parquet").to_pylist()


def test_the_splits_are_all_images_of_scikit_learn_once():
    train, test = rows_of("train"), rows_of("test")
    assert (len(train), len(test)) == (1437, 360)
    held_out = {row["image"]["bytes"] for row in test}
    assert sum(row["image"]["bytes"] in held_out for row in train) == 0
    assert {row["answer"] for row in test} == set("0123456789")
    assert all(row["prompt"] == [{"role": "user", "content": "Which digit is this?"}] for row in train)
    pixels = np.array(Image.open(io.BytesIO(test[0]["image"]["bytes"])))
    assert pixels.shape == (8, 8)
    assert test[0]["answer"] == "0"
    assert pixels.max() == 239  # 15 of 16, the brightest pixel of scikit-learn's first image


def test_everything_embedded_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts) < 1_000_000


def test_the_tokenizer_is_what_the_script_builds():
    from transformers import AutoTokenizer

    spec = importlib.util.spec_from_file_location("digits_build", FOLDER / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert AutoTokenizer.from_pretrained(FOLDER / "model").get_vocab() == build.build_tokenizer().get_vocab()


def test_a_shorter_run_improves_on_images_it_was_not_trained_on(tmp_path):
    fields = ["max_steps=40", "eval_steps=40", "prompts_per_step=64", "learning_rate=5e-4", "threads=1"]
    options = [word for field in fields for word in ("--set", field)]
    done = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "train", str(RECIPES / "digits.yaml"), "--output-dir", str(tmp_path / "run"), "-q", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval/reward"] for row in rows if "eval/reward" in row)
    assert before == pytest.approx(0.66, abs=0.02)
    assert after > before + 0.05
