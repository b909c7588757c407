"""Reward for reasoning inside one pair of think tags."""

from __future__ import annotations

from typing import Any

from rloo_cli.rewards.inputs import completion_text

OPEN, CLOSE = "<think>", "</think>"


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 for each completion that begins with `<think>`, has no second one, and closes it with `</think>`; else 0.0.

    >>> think_format_reward(["<think>1+1</think>2", "2"])
    [1.0, 0.0]
    """
    return [float(_is_well_formed(completion_text(completion))) for completion in completions]


def _is_well_formed(text: str) -> bool:
    return text.startswith(OPEN) and OPEN not in text[len(OPEN) :] and CLOSE in text
