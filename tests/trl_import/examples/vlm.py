from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

dataset = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")


def names_a_number(completions, solution, **kwargs):
    return [float(any(c.isdigit() for c in completion[0]["content"])) for completion in completions]


trainer = RLOOTrainer(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    reward_funcs=[names_a_number],
    args=RLOOConfig(output_dir="vlm", num_generations=2, per_device_train_batch_size=2, max_completion_length=64),
    train_dataset=dataset,
)
trainer.train()
