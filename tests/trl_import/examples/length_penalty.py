import functools

from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

IDEAL = 4 * 10
BATCH = 8


def length_reward(completions, ideal=20, **kwargs):
    return [-abs(ideal - len(c[0]["content"] if isinstance(c, list) else c)) / ideal for c in completions]


def main():
    dataset = load_dataset("trl-lib/tldr", split="train[:2000]")
    dataset = dataset.shuffle(seed=0).select(range(1000))
    config = RLOOConfig(
        "tldr-short", per_device_train_batch_size=BATCH, learning_rate=1e-5 * 2, reward_weights=[1.0, 0.1], num_generations=4
    )
    config.beta = 0.02
    trainer = RLOOTrainer(
        "Qwen/Qwen2-0.5B-Instruct",
        [functools.partial(length_reward, ideal=IDEAL), lambda completions, **kwargs: [float("!" not in str(c)) for c in completions]],
        config,
        dataset,
    )
    trainer.train()
    trainer.push_to_hub("me/tldr-short")


if __name__ == "__main__":
    main()
