"""The quickstart's reward, and all there is to one: a function from completions to numbers."""

from __future__ import annotations

from typing import Any


def correct_answer(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    r"""1.0 where a completion ends with the right answer in a box, as in `\boxed{170}`; else 0.0.

    `answer` is the column of that name in data/train.jsonl, one element a completion.
    """
    texts = [messages[0]["content"] for messages in completions]
    return [float(text.endswith(f"\\boxed{{{gold}}}")) for text, gold in zip(texts, answer, strict=True)]
