"""Run folders made up: metrics that follow a course, rollouts, a recipe, an environment. Nothing is trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from rloo_cli.recipe.dump import dump_recipe
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.rollouts import RolloutRow, write_rollouts
from rloo_cli.types import FinishReason

COMPLETIONS = 128
"""Of a step."""
RECIPE = """
model: {model_name_or_path: some/model}
data: {dataset_name: some/data, dataset_test_split: test}
rewards:
  - {function: my_rewards.correct}
  - {function: my_rewards.style, weight: 0.25}
generation: {num_generations: 8, max_completion_length: 512}
algorithm: {beta: 0.02}
training: {prompts_per_step: 16, max_steps: STEPS, learning_rate: 2.0e-6, max_grad_norm: 1.0}
evaluation: {eval_strategy: steps, eval_steps: 50}
"""
Course = Callable[[float], float]
"""A quantity over the run, from 0 to 1."""


def healthy(rng: random.Random) -> dict[str, Course]:
    """Courses of a run in which all is well."""

    def noise(size: float) -> float:
        return rng.gauss(0, size)

    return {
        "reward": lambda t: 0.2 + 0.6 * (1 - math.exp(-3 * t)) + noise(0.02),
        "reward_std": lambda t: 0.4 - 0.2 * t + noise(0.01),
        "rewards/correct/mean": lambda t: 0.1 + 0.6 * (1 - math.exp(-3 * t)) + noise(0.02),
        "rewards/style/mean": lambda t: 0.4 + 0.3 * t + noise(0.02),
        "completions/mean_length": lambda t: 180 + 60 * t + noise(5),
        "completions/min_length": lambda t: 40 + noise(5),
        "completions/max_length": lambda t: 480 + noise(10),
        "completions/clipped_ratio": lambda t: max(0.0, 0.04 - 0.03 * t + noise(0.004)),
        "groups/zero_std": lambda t: min(1.0, max(0.0, 0.2 + 0.1 * t + noise(0.03))),
        "groups/no_signal": lambda t: 0.0,
        "rows/unscored": lambda t: 0.0,
        "rewards/failures": lambda t: 0.0,
        "entropy": lambda t: 0.5 - 0.2 * t + noise(0.01),
        "kl": lambda t: 0.02 * t + noise(0.001),
        "kl/sequence": lambda t: 4 * t,
        "grad_norm": lambda t: 0.6 + abs(noise(0.1)),
        "clip_ratio/region_mean": lambda t: 0.0,
        "loss": lambda t: noise(0.05),
        "learning_rate": lambda t: 2e-6 * (1 - t),
        "sampling/logp_diff_mean": lambda t: 0.004 + abs(noise(0.0005)),
        "sampling/ess": lambda t: 0.99 - abs(noise(0.002)),
        "perf/seconds/generate": lambda t: 3.0 + t + noise(0.1),
        "perf/seconds/reward": lambda t: 0.2 + abs(noise(0.02)),
        "perf/seconds/train": lambda t: 2.0 + 0.5 * t + noise(0.1),
        "perf/seconds/sync": lambda t: 0.3,
        "perf/seconds/step": lambda t: 5.6 + 1.5 * t,
        "perf/tokens_per_second": lambda t: 4200 + noise(100),
    }


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    seed: int = 0,
    changed: Mapping[str, Course] | None = None,
    evaluations: tuple[float, ...] = (0.2, 0.8),
) -> Path:
    """A run folder of so many steps; `changed`: courses other than the healthy ones, None taking a key away."""
    folder.mkdir(parents=True, exist_ok=True)
    run, courses = RunFolder(folder), {**healthy(random.Random(seed)), **(changed or {})}
    rows = []
    for step in range(1, steps + 1):
        t = (step - 1) / max(1, steps - 1)
        rows.append({"step": step, "num_tokens": step * 25_000} | {key: course(t) for key, course in courses.items()})
    for i, reward in enumerate(evaluations):
        step = round(steps * i / max(1, len(evaluations) - 1))
        rows.append(
            {"step": step, "eval/reward": reward, "eval/rewards/correct/std": 0.4, "eval/prompts": 400, "perf/seconds/evaluate": 3.0}
        )
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "source.yaml").write_text(RECIPE.replace("STEPS", str(steps)))
    run.recipe.write_text(dump_recipe(load_recipe(folder / "source.yaml").recipe))
    run.environment.write_text(json.dumps({"time": "2026-01-31T17:45:01+00:00", "command": ["rloo", "train"], "host": "node-1",
        "cores": 16, "cpu": "A Processor", "memory_bytes": 1 << 37, "gpus": [], "git": {"commit": "c0ffee", "changed": False},
        "packages": {"torch": "2.13.0"}, "total_steps": steps, "completions_per_step": COMPLETIONS}))  # fmt: skip
    return folder


def write_step(folder: Path, step: int, rows: list[RolloutRow], *, kind: str = "train") -> None:
    """A rollout file of it."""
    run = RunFolder(folder)
    path = {"train": run.rollout_file, "eval": run.eval_rollout_file, "failed": run.failed_batch}[kind](step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rollouts(path, rows)


def group(
    prompt_row: int,
    rewards: list[float | None],
    *,
    text: str = "It is {i}.",
    by_function: dict[str, float | None] | None = None,
    **changes: object,
) -> list[RolloutRow]:
    """The rows of a group, with their advantages."""
    known = [reward for reward in rewards if reward is not None]
    rows = []
    for i, reward in enumerate(rewards):
        others = (sum(known) - (reward or 0.0)) / max(1, len(known) - 1)
        fields: dict[str, object] = {
            "step": 1,
            "prompt_row": prompt_row,
            "prompt": [{"role": "user", "content": f"What is {prompt_row}+{prompt_row}?"}],
            "prompt_text": f"<|im_start|>user\nWhat is {prompt_row}+{prompt_row}?<|im_end|>\n<|im_start|>assistant\n",
            "completion": text.replace("{i}", str(i)),
            "completion_ids": tuple(range(4 + 3 * i)),
            "logprobs": (-1.0,) * (4 + 3 * i),
            "finish_reason": FinishReason.TRUNCATED if i == 7 else FinishReason.STOPPED,
            "weights_version": 0,
            "reward": reward,
            "advantage": None if reward is None else reward - others,
            "rewards": by_function or {"correct": reward, "style": 0.5},
        }
        rows.append(RolloutRow(**(fields | changes)))  # type: ignore[arg-type]
    return rows


def write_rollout_steps(folder: Path, steps: int, *, every: int = 1, seed: int = 0, words: int = 30) -> None:
    """Rollout files of texts that look like something: 16 groups of 8 a step."""
    rng = random.Random(seed)
    vocabulary = ("so the sum of these two numbers is carried over and then we check each digit again because wait that cannot be right "
                  "let me think first add seven nine twelve therefore answer boxed 42 17 308 = + x").split()  # fmt: skip
    for step in range(every, steps + 1, every):
        rows = []
        for prompt in range(16):
            rewards = [float(rng.random() < 0.2 + 0.6 * step / steps) for _ in range(8)]
            for row, _ in zip(group(step * 16 + prompt, rewards, step=step), range(8), strict=True):
                text = " ".join(rng.choices(vocabulary, k=max(1, round(rng.gauss(words, words / 4)))))
                rows.append(RolloutRow(**{**{name: getattr(row, name) for name in RolloutRow.__dataclass_fields__}, "completion": f"<think>{text}</think>\n\\boxed{{{rng.randrange(300)}}}", "completion_ids": tuple(rng.choices(range(200), k=len(text) // 4)), "logprobs": (-0.5,) * (len(text) // 4)}))  # fmt: skip
        write_step(folder, step, rows)
