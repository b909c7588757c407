"""Run folders of rollouts alone, written as training writes them."""

from __future__ import annotations

import json
from pathlib import Path

from rloo_cli.run.folder import RunFolder
from rloo_cli.run.rollouts import RolloutRow, write_rollouts
from rloo_cli.types import FinishReason

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \r gone \u202e txet"
WIDE = "数学の問題を一歩ずつ考えます。" * 30
FAMILY = "👩‍👩‍👧 and [bold]markup[/bold] :smile:"


def row(**changes) -> RolloutRow:
    """A completion of step 3 with reward 1."""
    fields = {
        "step": 3,
        "prompt_row": 7,
        "prompt": [{"role": "user", "content": "Add 12 and 30."}],
        "prompt_text": "<|im_start|>user\nAdd 12 and 30.<|im_end|>\n",
        "completion": "42",
        "completion_ids": (1, 2, 3),
        "logprobs": (-1.0, -1.0, -1.0),
        "finish_reason": FinishReason.STOPPED,
        "weights_version": 2,
        "reward": 1.0,
        "advantage": 0.5,
        "rewards": {"correct": 1.0, "style": None},
    }
    return RolloutRow(**(fields | changes))


def write_run(folder: Path, **steps: list[RolloutRow]) -> Path:
    """A run folder with these files: `s3`, `eval_3`, `failed_4` and their rows."""
    run = RunFolder(folder)
    for name, rows in steps.items():
        kind, _, number = name.rpartition("_")
        path = {
            "": lambda: run.rollout_file(int(number[1:])),
            "eval": lambda: run.eval_rollout_file(int(number)),
            "failed": lambda: run.failed_batch(int(number)),
        }[kind]()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rollouts(path, rows)
    return folder


def write_failed_facts(folder: Path, step: int, **facts) -> None:
    """What training notes beside a batch that it stopped at."""
    RunFolder(folder).failed_batch(step).with_suffix(".json").write_text(json.dumps(facts))
