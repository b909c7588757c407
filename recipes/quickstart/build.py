"""Rebuild everything in this folder that is not source: tokenizer, base model, training and held-out problems.

    python recipes/quickstart/build.py                # about five minutes on one CPU core
    python recipes/quickstart/build.py --data-only    # only data/train.jsonl and data/test.jsonl

The task is the sum of three two-digit numbers. The base model has learnt two ways of answering it: to blurt the sum out
(mostly wrong) and to add column by column inside <think> (mostly right). Its last lessons make it prefer to blurt. What
reinforcement learning adds is the preference, and a little accuracy.

One process, one thread, fixed seeds: the same machine and versions give the same bytes. Another CPU may round differently and
then gives other weights of the same quality.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

HERE = Path(__file__).resolve().parent
Triple = tuple[int, int, int]

VOCABULARY = 340  # 256 bytes, 3 special tokens, the rest merges
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_ENGLISH = """The model reads a question and writes an answer. You are a helpful assistant. Please think step by step,
then put the final answer in a box. How many are there in total? Add the numbers, write down the sum, and carry the one.
What is the result when this is done? Show your work, and give the answer at the end. Let us check that again."""

SUPERVISED_STEPS = 900
SUPERVISED_BATCH = 128
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
THINKING_SHARE = 0.85  # of the examples, while the model learns to add
THINKING_SHARE_AT_THE_END = 0.38  # in the last steps: now it would rather blurt
LAST_LESSONS = 0.15  # the share of the steps that the second figure holds for

TRAIN_ROWS = 2048  # the recipe uses 80 steps × 16 = 1280 of them
TEST_ROWS = 512
IGNORED = -100  # the label that transformers' loss leaves out


# --- the task ---------------------------------------------------------------------------------------------------------


def is_held_out(triple: Triple) -> bool:
    """Whether the triple belongs to the test set: one in ten, the same for every order of its numbers."""
    digest = hashlib.sha256("+".join(map(str, sorted(triple))).encode()).digest()
    return digest[0] * 256 + digest[1] < 65536 // 10


def triples(seed: int, *, held_out: bool) -> Iterator[Triple]:
    """An endless stream of triples of two-digit numbers, all held out or all not."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for a, b, c in torch.randint(10, 100, (1024, 3), generator=generator).tolist():
            if is_held_out((a, b, c)) == held_out:
                yield a, b, c


def question(triple: Triple) -> str:
    """`What is 47+38+85?`"""
    return f"What is {'+'.join(map(str, triple))}?"


def blurted(triple: Triple) -> str:
    r"""`\boxed{170}`"""
    return f"\\boxed{{{sum(triple)}}}"


def thought_through(triple: Triple) -> str:
    r"""`<think>7+8+5=20, 4+3+8+2=17</think>\boxed{170}`: the ones, then the tens and what was carried."""
    ones = [number % 10 for number in triple]
    tens = [number // 10 for number in triple] + [sum(ones) // 10]
    columns = (f"{'+'.join(map(str, column))}={sum(column)}" for column in (ones, tens))
    return f"<think>{', '.join(columns)}</think>{blurted(triple)}"


def row(triple: Triple) -> dict[str, Any]:
    """One line of the data set: a conversation to complete, and the column that the reward compares with."""
    return {"prompt": [{"role": "user", "content": question(triple)}], "answer": str(sum(triple))}


def write_rows(path: Path, stream: Iterator[Triple], count: int) -> None:
    """Write `count` distinct problems as JSON lines."""
    distinct: dict[Triple, None] = {}
    while len(distinct) < count:
        distinct[next(stream)] = None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(triple)) + "\n" for triple in distinct), encoding="utf-8")


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def byte_pair_encoding(texts: list[str]) -> dict[str, Any]:
    """Vocabulary and merges of a byte-level BPE, as in tokenizer.json.

    transformers gives every tokenizer of a qwen2 model Qwen2's own pre-tokenizer: merges learnt under any other would give
    other token ids once the model is loaded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return json.loads(tokenizer.to_str())["model"]


def build_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2 tokenizer of 340 tokens, and `<think>` and `</think>` as ordinary tokens: special ones would be hidden from rewards."""
    stream = triples(seed=1, held_out=False)
    turns = [f"user\n{question(triple)}\nassistant\n{blurted(triple)}" for triple in islice(stream, 100)]
    bpe = byte_pair_encoding(turns + PLAIN_ENGLISH.splitlines() * 100)
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        unk_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        model_max_length=512,
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# --- the base model ---------------------------------------------------------------------------------------------------


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.44 million random weights. head_dim 32 is the smallest that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def encode(tokenizer: Qwen2Tokenizer, triple: Triple, completion: str) -> tuple[list[int], list[int]]:
    """Token ids of prompt and completion; the completion ends with `<|im_end|>`."""
    messages = [{"role": "user", "content": question(triple)}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt), tokenizer.encode(completion + TURN_END)


def supervised_batch(tokenizer: Qwen2Tokenizer, stream: Iterator[Triple], thinking: torch.Tensor) -> dict[str, torch.Tensor]:
    """One example for each element of `thinking`, padded on the right; only completions are learnt."""
    rows = []
    for triple, thinks in zip(stream, thinking.tolist(), strict=False):
        rows.append(encode(tokenizer, triple, thought_through(triple) if thinks else blurted(triple)))
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for i, (prompt, completion) in enumerate(rows):
        ids[i, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        labels[i, len(prompt) : len(prompt) + len(completion)] = torch.tensor(completion)
    return {"input_ids": ids, "labels": labels}


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, steps: int) -> None:
    """Supervised training, in place: learning rate up over 50 steps, then down to 0 along a line."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / (steps - WARMUP_STEPS))
    )
    stream = triples(seed=2, held_out=False)
    coin = torch.Generator().manual_seed(3)
    for step in range(steps):
        share = THINKING_SHARE if step < (1 - LAST_LESSONS) * steps else THINKING_SHARE_AT_THE_END
        thinking = torch.rand(SUPERVISED_BATCH, generator=coin) < share
        # Right padding needs no attention mask: a causal model's real positions never look at it.
        loss = model(**supervised_batch(tokenizer, stream, thinking)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"supervised step {step:4d}   loss {loss.item():.4f}", flush=True)


def write_model(folder: Path, model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Write a plain transformers folder, weights in bfloat16: half the bytes in the repository."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Build what the arguments ask for."""
    parser = argparse.ArgumentParser(description="Rebuild the quickstart's tokenizer, base model and data.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: this script's own)")
    parser.add_argument("--steps", type=int, default=SUPERVISED_STEPS, help="supervised steps; fewer give a weaker base")
    parser.add_argument("--data-only", action="store_true", help="leave the model as it is")
    arguments = parser.parse_args()

    write_rows(arguments.out / "data" / "train.jsonl", triples(seed=4, held_out=False), TRAIN_ROWS)
    write_rows(arguments.out / "data" / "test.jsonl", triples(seed=5, held_out=True), TEST_ROWS)
    if not arguments.data_only:
        torch.set_num_threads(1)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, tokenizer, arguments.steps)
        write_model(arguments.out / "model", model, tokenizer)


if __name__ == "__main__":
    main()
