"""Your reward function. Called once a prompt, with all of its completions; returns one number for each.

It runs in a worker process with a deadline. An exception stops the run and names this file, the prompt and the completion:
better than a run that learns from a mistake. None instead of a number means "does not apply".
"""

from __future__ import annotations

from typing import Any


def right_number_of_words(completions: list[list[dict[str, str]]], words: list[int], **kwargs: Any) -> list[float]:
    """1.0 for exactly `words` words, less for each word too many or missing.

    Args:
        completions: one conversation for each completion, `[{"role": "assistant", "content": "…"}]`, because the prompts are
            chat messages. String prompts give strings.
        words: the column `words` of prompts.jsonl, one value for each completion. Name any column and it is passed.
        kwargs: everything that was not named: `prompts`, `completion_ids`, the other columns.
    """
    texts = [messages[0]["content"] for messages in completions]
    return [1.0 / (1.0 + abs(len(text.split()) - wanted)) for text, wanted in zip(texts, words, strict=True)]
