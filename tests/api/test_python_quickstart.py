"""The shipped program trains, alone and under a launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "recipes" / "python_quickstart.py"
TWO_TRAININGS = """\
import sys
from datasets import Dataset
from rloo_cli import RLOOConfig, RLOOTrainer

for name, seed in (("a", 1), ("b", 2)):
    config = RLOOConfig(
        output_dir=f"{sys.argv[1]}/{name}", random_weights=True, num_generations=2, max_completion_length=4, prompts_per_step=4, max_steps=2,
        beta=0.0, bf16=False, seed=seed,
    )
    rows = Dataset.from_dict({"prompt": [f"Write {i}." for i in range(8)]})
    trainer = RLOOTrainer(sys.argv[2], lambda completions, **kwargs: [float(len(text)) for text in completions], config, rows)
    output = trainer.train()
    print("ended", name, output.global_step, output.metrics["reward"], trainer.save_model(f"{sys.argv[1]}/copy-{name}"))
"""


def python(*arguments, timeout=280):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=timeout)


def test_the_shipped_program_learns(tmp_path):
    done = python(PROGRAM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before, after, steps = re.search(r"reward ([\d.]+) -> ([\d.]+) in (\d+) steps", done.stdout).groups()
    assert int(steps) == 30
    assert float(after) > float(before) + 0.1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 30


@pytest.mark.slow
def test_processes_of_a_launcher_train_one_after_the_other_together(tmp_path):
    (tmp_path / "program.py").write_text(TWO_TRAININGS)
    model = ROOT / "recipes" / "smoke" / "model"
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", tmp_path / "program.py", tmp_path, model)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = sorted(line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("ended"))
    assert [name for name, *_ in ended] == ["a", "a", "b", "b"]  # both ranks, of both
    assert ended[0] == ended[1] != ended[2] == ended[3]
    for name in ("a", "b"):
        assert json.loads((tmp_path / name / "environment.json").read_text())["num_processes"] == 2
        assert (tmp_path / f"copy-{name}" / "model.safetensors").is_file()
