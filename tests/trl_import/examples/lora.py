import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward

model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(model_id)
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", bias="none")

splits = load_dataset("trl-lib/DeepMath-103K")
trainer = RLOOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[think_format_reward, get_soft_overlong_punishment(max_completion_len=64, soft_punish_cache=16)],
    args=RLOOConfig(output_dir="lora", learning_rate=1e-4, eval_strategy="steps", eval_steps=2, per_device_train_batch_size=4),
    train_dataset=splits["train"],
    eval_dataset=splits["test"].select(range(4)),
    peft_config=peft_config,
)
trainer.train()
