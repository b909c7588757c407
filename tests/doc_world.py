"""The folder in which the pages' command blocks are run: what the pages speak of, made small on the spot.

Commands are run as they stand, but for SUBSTITUTES. What makes them quick is the folder: copies of the shipped recipes with a step or two,
a model of 0.44 million parameters wherever a page names one of the hub's, and finished runs under the names that pages use.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from rloo_cli.cli.app import exit_code_of

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```([\w-]*)[ ]?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODEL = str(ROOT / "recipes" / "quickstart" / "model")

SUBSTITUTES = (
    ("runs/demo-DATE-TIME", "runs/mine", "make demo names its run by the time"),
    ("Qwen/Qwen2-0.5B-Instruct", MODEL, "a model of the hub"),
    ("Qwen/Qwen2.5-0.5B-Instruct", MODEL, "a model of the hub"),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", MODEL, "a model of the hub"),
    (".venv/bin/python", sys.executable, "the environment of `make install`"),
    ("--num-processes 8", "--num-processes 2", "as many processes as GPUs: two on a CPU do the same"),
)
"""(as a page has it, what is run instead, what it stands for)."""
SMALL = (
    (r"max_steps: \d+", "max_steps: 2"),
    (r"num_train_epochs: [\d.]+", "max_steps: 2"),
    (r"prompts_per_step: \d+", "prompts_per_step: 2"),
    (r"num_generations: \d+", "num_generations: 2"),
    (r"max_completion_length: \d+", "max_completion_length: 8"),
    (r"eval_steps: \d+", "eval_steps: 2"),
    (r"save_steps: \d+", "save_steps: 2"),
)
"""What makes a recipe of the folder quick; its other lines are as shipped."""
REWARDS = """
def strict(completions, **kwargs):
    return [float(len(c if isinstance(c, str) else c[-1]["content"]) % 2) for c in completions]


score = strict
"""

TRL_SCRIPT = f"""
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer


def has_a_digit(completions, **kwargs):
    return [float(any(c.isdigit() for c in text)) for text in completions]


if __name__ == "__main__":
    trainer = RLOOTrainer(
        model={MODEL!r},
        reward_funcs=has_a_digit,
        args=RLOOConfig(output_dir="runs/trl", max_completion_length=8, num_generations=2, max_steps=2),
        train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    )
    trainer.train()
"""


def pages() -> list[Path]:
    """Every page whose blocks are run; a new one is here by itself."""
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("README.md")])


def substituted(text: str) -> str:
    """A page's text as it is run."""
    for old, new, _ in SUBSTITUTES:
        text = text.replace(old, new)
    return text


def build_world(world: Path) -> None:
    """Make the folder: recipes, the README's own task, data, and the runs that pages look at."""
    shutil.copytree(ROOT / "recipes", world / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in (world / "recipes").rglob("*.yaml"):
        recipe.write_text(small(recipe.read_text(encoding="utf-8")), encoding="utf-8")
    _limit_evaluation(world / "recipes" / "quickstart.yaml")
    (world / "benchmarks").symlink_to(ROOT / "benchmarks")
    (world / "tests").symlink_to(ROOT / "tests")
    for name, text in _files_of(ROOT / "README.md").items():
        (world / name).parent.mkdir(exist_ok=True)
        (world / name).write_text(substituted(text), encoding="utf-8")
    task = world / "my-task" / "recipe.yaml"
    text = small(task.read_text(encoding="utf-8")).replace("max_steps: 2", "max_steps: 44")
    task.write_text(f"{text}  bf16: false\nrun: {{save_steps: 40}}\n", encoding="utf-8")
    for name in ("recipe.yaml", "mine.yaml"):
        text = task.read_text(encoding="utf-8").replace("max_steps: 44", "max_steps: 2")
        text = text.replace("dataset_name: prompts.jsonl", "dataset_name: my-task/prompts.jsonl")
        (world / name).write_text(text.replace("reward.right_number", "my_rewards.strict"), encoding="utf-8")
    (world / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    shutil.copy(world / "my-task" / "prompts.jsonl", world / "prompts.jsonl")
    _write_data(world)
    _make_runs(world)


def small(text: str) -> str:
    """A recipe's text with the sizes of SMALL."""
    for pattern, new in SMALL:
        text = re.sub(pattern, new, text)
    return text


def _files_of(page: Path) -> dict[str, str]:
    return {name: text for _, name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name}


def _limit_evaluation(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("evaluation:\n", "evaluation:\n  max_eval_samples: 4\n"), encoding="utf-8")


def _write_data(world: Path) -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "final_answer": str(2 * n)} for n in range(1, 31)]
    (world / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    written = [{"prompt": f"What is {n} + 1?", "completion": f"\\boxed{{{n + 1}}}"} for n in range(4)]
    (world / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    (world / "train.py").write_text(TRL_SCRIPT, encoding="utf-8")
    (world / "prompts.txt").write_text("What is 1+2+3?\nWhat is 4+5+6?\n", encoding="utf-8")


def _make_runs(world: Path) -> None:
    """runs/my-task, stopped at step 40 of its 44; runs/slow, likewise; runs/mine, quick, a and b, finished after 80."""
    sizes = ["max_steps=80", "save_steps=40", "eval_steps=80", "max_completion_length=4", "prompts_per_step=16"]
    _train(world, "recipes/quickstart.yaml", "runs/mine", *(word for size in sizes for word in ("--set", size)))
    for name in ("quick", "a", "b", "slow"):
        shutil.copytree(world / "runs" / "mine", world / "runs" / name)
    _train(world, "my-task/recipe.yaml", "runs/my-task")
    _stop(world / "runs" / "my-task", last=44)
    _stop(world / "runs" / "slow", last=80)
    failed = world / "runs" / "my-task" / "failed"  # in a real one the last columns are unknown; it is read the same way
    failed.mkdir()
    shutil.copy(world / "runs" / "my-task" / "rollouts" / "000012.parquet", failed / "step-000012.parquet")


def _train(world: Path, recipe: str, run: str, *options: str) -> None:
    assert exit_code_of(["train", str(world / recipe), "--output-dir", str(world / run), "-q", *options]) == 0


def _stop(run: Path, *, last: int) -> None:
    """Leave of a finished run what there was after step 40, but for its metrics and rollouts, which a resume takes back to there."""
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / f"{last:06d}")
