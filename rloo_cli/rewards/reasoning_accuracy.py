"""accuracy_reward for models that think first: only what follows the reasoning counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rloo_cli.rewards.accuracy import check_rows, score_answers
from rloo_cli.rewards.inputs import completion_text, gold_values


def reasoning_accuracy_reward(
    completions: list[Any],
    column: str | None = None,
    reasoning_delimiters: str | Sequence[str] = ("</think>",),
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """accuracy_reward of what follows the last of the delimiters; 0.0 for completions without one, however right they are.

    >>> reasoning_accuracy_reward([r"<think>1/3?</think> \\boxed{\\frac{1}{3}}", r"<think> \\boxed{3}"], answer=["1/3", "3"])
    [1.0, 0.0]
    """
    delimiters = [reasoning_delimiters] if isinstance(reasoning_delimiters, str) else list(reasoning_delimiters)
    answers = [_after_reasoning(completion_text(completion), delimiters) for completion in completions]
    return score_answers(answers, gold_values(kwargs, column), log_metric, log_extra)


def _after_reasoning(text: str, delimiters: list[str]) -> str | None:
    ends = [text.rfind(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


reasoning_accuracy_reward.check_rows = check_rows  # type: ignore[attr-defined]
