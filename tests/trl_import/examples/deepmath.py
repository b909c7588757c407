from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = RLOOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    args=RLOOConfig(use_vllm=True, vllm_mode="server", per_device_train_batch_size=4, num_generations=2),
    train_dataset=dataset,
)
trainer.train()
