import argparse

from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2-0.5B-Instruct")
parser.add_argument("--dataset-name", type=str, default="trl-lib/tldr")
parser.add_argument("--lr", type=float, default=2e-6)
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

vocabulary = load_dataset("me/words", split="train")["word"]


def in_vocabulary(completions, **kwargs):
    return [float(str(c) in vocabulary) for c in completions]


def vowels(completions, **kwargs):
    return [float(sum(str(c).count(v) for v in "aeiou")) for c in completions]


config = RLOOConfig(output_dir="words", learning_rate=args.lr, max_steps=args.steps, hub_token="hf_0123456789", use_liger_kernel=True)
trainer = RLOOTrainer(
    model=args.model,
    reward_funcs=[in_vocabulary, vowels],
    args=config,
    train_dataset=load_dataset(args.dataset_name, split="train"),
)
trainer.train()
