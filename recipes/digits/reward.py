"""The reward of recipes/digits.yaml."""

from __future__ import annotations

from typing import Any


def right_digit(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the digit and nothing else, else 0.0."""
    return [float(completion[0]["content"].strip() == right) for completion, right in zip(completions, answer, strict=True)]
