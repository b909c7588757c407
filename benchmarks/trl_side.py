"""The peer: TRL's RLOOTrainer on a workload, in a process of its own. Prints one JSON line; `peer.py` calls it.

Its best settings on a CPU: one micro-batch for the whole step, no gradient checkpointing, fused AdamW, weights in float32, bf16
autocast or not as asked. Sampling is plain (temperature 1, no top-k, no top-p) and ends at the same token, as on our side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer
from workload import Workload, from_json, load_reward, read_rows


class StepTimes(TrainerCallback):
    """Wall seconds, mean completion length and reward of each optimizer step, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mean_lengths: list[float] = []
        self.rewards: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "completions/mean_length" in logs:
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now
            self.mean_lengths.append(logs["completions/mean_length"])
            self.rewards.append(logs["reward"])


def run(workload: Workload, *, steps: int, bf16: bool, continuous_batching: bool) -> dict[str, Any]:
    """Seconds, completion tokens and reward of each step, warm-up included."""
    config = RLOOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        per_device_train_batch_size=workload.rows,  # TRL counts completions here
        gradient_accumulation_steps=1,
        num_generations=workload.num_generations,
        max_completion_length=workload.max_completion_length,
        temperature=1.0,
        beta=workload.beta,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        max_steps=steps,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_dropout=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_transformers_continuous_batching=continuous_batching,
    )
    times = StepTimes()
    trainer = RLOOTrainer(
        model=AutoModelForCausalLM.from_pretrained(workload.model, dtype="float32"),
        reward_funcs=load_reward(workload),
        args=config,
        train_dataset=Dataset.from_list(read_rows(workload)),
        processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
        callbacks=[times],
    )
    trainer.train()
    tokens = [length * workload.rows for length in times.mean_lengths]
    return {"seconds": times.seconds, "tokens": tokens, "rewards": times.rewards}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--continuous-batching", action="store_true")
    arguments = parser.parse_args()
    result = run(
        from_json(arguments.workload),
        steps=arguments.steps,
        bf16=arguments.bf16,
        continuous_batching=arguments.continuous_batching,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
