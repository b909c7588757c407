import asyncio
import os

from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

try:
    import numpy as np
except ImportError:
    np = None

JUDGE = os.environ.get("JUDGE", "local")


class Judge:
    """Stands for a client of some service."""

    async def score(self, text):
        await asyncio.sleep(0)
        return len(set(text)) / (len(text) + 1)


judge = Judge()


async def judge_reward(completions, log_extra=None, log_metric=None, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    scores = await asyncio.gather(*(judge.score(t) for t in texts))
    if log_extra:
        log_extra("judge", [JUDGE] * len(texts))
    if log_metric:
        log_metric("judge/mean", float(np.mean(scores)) if np else sum(scores) / len(scores))
    return list(scores)


def only_some_rows(completions, answer, trainer_state=None, **kwargs):
    """None where there is no answer; harder later."""
    late = trainer_state is not None and trainer_state.global_step > 0
    return [None if not a else float(str(a) in str(c)) * (2.0 if late else 1.0) for c, a in zip(completions, answer)]


trainer = RLOOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[judge_reward, only_some_rows],
    args=RLOOConfig(output_dir="judged", num_generations=2, per_device_train_batch_size=2),
    train_dataset=load_dataset("json", data_files="questions.jsonl", split="train"),
)
trainer.train()
