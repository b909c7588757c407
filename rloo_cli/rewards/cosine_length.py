"""accuracy_reward scaled by length: short when right, long when wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rloo_cli.rewards.accuracy import accuracy_reward, check_rows
from rloo_cli.rewards.inputs import ParameterError


def cosine_length_reward(
    completions: list[Any],
    completion_ids: list[list[int]],
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    column: str | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """For each completion a value on half a cosine over its length in tokens; None where the gold cannot be read.

    low + ½ (high − low)(1 + cos(π · min(1, length / max_len))): from max_value_correct down to min_value_correct for right
    answers, from min_value_wrong up to max_value_wrong for wrong ones. Right is what accuracy_reward says.
    Source: Appendix C.1 of "Demystifying Long Chain-of-Thought Reasoning", arXiv 2502.03373; parameters as in open-r1.

    >>> cosine_length_reward([r"\\boxed{3}", r"\\boxed{2}"], [[1] * 50, [1] * 50], max_len=100, answer=["3", "3"])
    [0.75, -0.75]
    """
    check_values(max_len)

    def scaled(is_right: float | None, length: int) -> float | None:
        if is_right is None:
            return None
        low, high = (min_value_correct, max_value_correct) if is_right else (max_value_wrong, min_value_wrong)
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * min(1.0, length / max_len)))

    scores = accuracy_reward(completions, column=column, log_extra=log_extra, **kwargs)
    return [scaled(is_right, len(ids)) for is_right, ids in zip(scores, completion_ids, strict=True)]


def check_values(max_len: int, **kwargs: Any) -> None:
    """Raise ParameterError for parameters that make no sense."""
    if max_len < 1:
        raise ParameterError("max_len", f"max_len ({max_len}) must be at least 1")


cosine_length_reward.check_rows = check_rows  # type: ignore[attr-defined]
cosine_length_reward.check_values = check_values  # type: ignore[attr-defined]
