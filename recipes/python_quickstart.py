"""The smoke recipe from Python: a model of random weights learns to write letters. Half a minute on a CPU.

    python recipes/python_quickstart.py [OUTPUT_DIR]          or, on several processes (`accelerate launch` where there are GPUs):
    torchrun --standalone --nproc_per_node 2 recipes/python_quickstart.py OUTPUT_DIR

docs/python.md tells what each argument may be.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from rloo_cli import RLOOConfig, RLOOTrainer

SMOKE = Path(__file__).resolve().parent / "smoke"


def share_of_letters(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of letters in each completion; `log_metric` and the data set's columns are among kwargs."""
    return [sum(map(str.isalpha, text)) / len(text) if text else 0.0 for text in completions]


def main(output_dir: str | None = None) -> None:
    """Train thirty steps and say how the reward changed."""
    prompts = Dataset.from_dict({"prompt": [f"Write a word that begins with {letter}." for letter in "abcdefghijklmnop"]})
    config = RLOOConfig(
        output_dir=output_dir,
        random_weights=True,
        num_generations=4,
        max_completion_length=16,
        prompts_per_step=8,
        max_steps=30,
        learning_rate=3e-3,
        beta=0.0,
        bf16=False,
        report_to="none",
    )
    trainer = RLOOTrainer(
        model=str(SMOKE / "model"),
        reward_funcs=[share_of_letters, lambda completions, **kwargs: [-0.001 * len(text) for text in completions]],
        args=config,
        train_dataset=prompts,
    )
    result = trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {result.global_step} steps; the model: {trainer.save_model()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
