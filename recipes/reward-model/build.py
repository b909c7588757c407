"""Rebuild the reward model of recipes/reward-model.yaml: it prefers a worked, right answer over any other.

    python recipes/reward-model/build.py          # about a minute on one CPU core

The quickstart's base model, its language-model head replaced by one score, learns from pairs of completions of the same question, as
reward models are made of human preferences: the better one should score higher (Bradley and Terry's model). Better is the answer that adds
column by column and is right; worse is one of a blurted answer, a worked one whose box is wrong, and a worked one that was cut off.
One thread and fixed seeds: the same machine and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForSequenceClassification

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
STEPS = 250
PAIRS = 32
LEARNING_RATE = 5e-4


def load_quickstart() -> ModuleType:
    """The script that made the quickstart's data, for its questions and answers."""
    spec = importlib.util.spec_from_file_location("quickstart_build", QUICKSTART / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worse(task: ModuleType, triple: tuple[int, int, int], draw: random.Random) -> str:
    """A completion that should score lower than the worked, right one."""
    good = task.thought_through(triple)
    off = sum(triple) + draw.choice([-10, -3, -1, 1, 2, 10, 100])
    kind = draw.randrange(4)
    if kind == 0:
        return str(task.blurted(triple))
    if kind == 1:
        return f"\\boxed{{{off}}}"
    if kind == 2:
        return str(good).replace(f"\\boxed{{{sum(triple)}}}", f"\\boxed{{{off}}}")
    return str(good)[: draw.randrange(8, len(good) - 2)]


def scores(
    model: Qwen2ForSequenceClassification, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], answers: Sequence[str]
) -> torch.Tensor:
    """The score of each answer, [B]."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}, {"role": "assistant", "content": a}], tokenize=False)
        for q, a in zip(questions, answers, strict=True)
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    logits: torch.Tensor = model(**batch).logits
    return logits[:, 0]


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description="Rebuild the reward model.")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder to write to")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task, draw = load_quickstart(), random.Random(0)  # noqa: S311 - no secret is drawn
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    model = Qwen2ForSequenceClassification.from_pretrained(QUICKSTART / "model", num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, arguments.steps)
    stream = task.triples(seed=6, held_out=False)
    for step in range(arguments.steps):
        triples = [next(stream) for _ in range(PAIRS)]
        questions = [task.question(triple) for triple in triples]
        better = [task.thought_through(triple) for triple in triples]
        both = scores(model, tokenizer, questions * 2, better + [worse(task, triple, draw) for triple in triples])
        gap = both[:PAIRS] - both[PAIRS:]
        loss = -torch.nn.functional.logsigmoid(gap).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 0 or step == arguments.steps - 1:
            print(f"step {step:4d}   loss {loss.item():.4f}   pairs in the right order {(gap > 0).float().mean().item():.2f}", flush=True)
    model.config.id2label, model.config.label2id = {0: "score"}, {"score": 0}
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
