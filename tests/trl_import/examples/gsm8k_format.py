# Train a small model to answer GSM8K in an XML format.
import re

from datasets import Dataset, load_dataset
from trl import RLOOConfig, RLOOTrainer

SYSTEM_PROMPT = """Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""


def extract_xml_answer(text: str) -> str:
    answer = text.split("<answer>")[-1]
    return answer.split("</answer>")[0].strip()


def extract_hash_answer(text: str) -> str | None:
    return text.split("####")[1].strip() if "####" in text else None


def get_gsm8k_questions(split="train") -> Dataset:
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(
        lambda x: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
            "answer": extract_hash_answer(x["answer"]),
        }
    )


dataset = get_gsm8k_questions()


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if extract_xml_answer(r) == a else 0.0 for r, a in zip(responses, answer)]


def int_reward_func(completions, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if extract_xml_answer(r).isdigit() else 0.0 for r in responses]


# The strict format: newlines and all.
def strict_format_reward_func(completions, **kwargs) -> list[float]:
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(pattern, r) else 0.0 for r in responses]


model_name = "Qwen/Qwen2.5-1.5B-Instruct"
training_args = RLOOConfig(
    output_dir=f"outputs/{model_name}-gsm8k",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=4,
    max_completion_length=200,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="none",
    log_on_each_node=False,
)

trainer = RLOOTrainer(
    model=model_name,
    reward_funcs=[strict_format_reward_func, int_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
