"""The reward of the SmolLM2 benchmark: does the completion name the right number?"""

from __future__ import annotations

import re
from typing import Any


def reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the last number of the completion is the answer, else 0.0."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == gold) for found, gold in zip(numbers, answer, strict=True)]
