"""What both trainers are given: model, prompts, group size, lengths, reward. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "recipes" / "quickstart"
SMOLLM2 = Path("build/smollm2")

LEARNING_RATE = 1e-6  # too small to change lengths within a benchmark: both sides keep the same work from step to step


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One benchmark. Paths are absolute strings, so that it travels as JSON."""

    model: str
    prompts: str
    """JSONL file of conversational prompts with an `answer` column."""
    reward: str
    """Python file with a function `reward`, or the quickstart's `correct_answer`."""
    prompts_per_step: int
    num_generations: int
    max_completion_length: int
    beta: float
    learning_rate: float = LEARNING_RATE

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts_per_step * self.num_generations


def find_workload(name: str, *, smollm2: Path = SMOLLM2) -> Workload:
    """The workload called `quickstart` or `smollm2`, or SmolLM2's with the model in the folder `name`."""
    if name == "quickstart":
        return Workload(
            model=str(QUICKSTART / "model"),
            prompts=str(QUICKSTART / "data" / "train.jsonl"),
            reward=str(QUICKSTART / "reward.py"),
            prompts_per_step=16,
            num_generations=8,
            max_completion_length=48,
            beta=0.0,
        )
    model = smollm2 / "model" if name == "smollm2" else Path(name)
    prompts = smollm2 / "arithmetic.jsonl"
    for path in (model / "config.json", prompts):
        if not path.exists():
            raise SystemExit(f"{path} does not exist. `python benchmarks/smollm2.py fetch` makes model and prompts in {SMOLLM2}.")
    return Workload(
        model=str(model.resolve()),
        prompts=str(prompts.resolve()),
        reward=str(HERE / "reward.py"),
        prompts_per_step=4,
        num_generations=8,
        max_completion_length=64,
        beta=0.05,
    )


def read_rows(workload: Workload) -> list[dict[str, Any]]:
    """The rows of the workload's JSONL file."""
    return [json.loads(line) for line in Path(workload.prompts).read_text(encoding="utf-8").splitlines()]


def reward_name(workload: Workload) -> str:
    """The name of the one public function of the workload's reward file."""
    return "correct_answer" if Path(workload.reward).parent == QUICKSTART else "reward"


def load_reward(workload: Workload) -> Callable[..., list[float]]:
    """The reward function, imported from its file."""
    spec = importlib.util.spec_from_file_location("benchmark_reward", workload.reward)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, reward_name(workload))


def to_json(workload: Workload) -> str:
    """The workload as one line."""
    return json.dumps(asdict(workload))


def from_json(text: str) -> Workload:
    """The workload of `to_json`."""
    return Workload(**json.loads(text))
