"""A reward that random text gets different amounts of, so that even a smoke test has something to learn from."""

from __future__ import annotations

from typing import Any


def share_of_letters(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of letters among the characters of each completion (0.0 for an empty one). The prompts are strings, so completions are."""
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]
