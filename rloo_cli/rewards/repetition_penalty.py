"""Penalty for n-grams that a completion repeats."""

from __future__ import annotations

from typing import Any

from rloo_cli.rewards.inputs import ParameterError


def repetition_penalty_reward(
    completion_ids: list[list[int]], ngram_size: int = 3, max_penalty: float = -1.0, **kwargs: Any
) -> list[float]:
    """For each completion the share of its token n-grams that are repeats, times `max_penalty` (≤ 0).

    (1 − distinct n-grams / n-grams) · max_penalty; 0.0 for completions shorter than `ngram_size` tokens.
    Source: Appendix C.2 of "Demystifying Long Chain-of-Thought Reasoning", arXiv 2502.03373.

    >>> repetition_penalty_reward([[1, 2, 3, 4], [5, 5, 5, 5, 5]], ngram_size=2)
    [0.0, -0.75]
    """
    check_values(ngram_size, max_penalty)
    return [_repeated_share(ids, ngram_size) * max_penalty or 0.0 for ids in completion_ids]


def check_values(ngram_size: int = 3, max_penalty: float = -1.0, **kwargs: Any) -> None:
    """Raise ParameterError for parameters that make no sense."""
    if max_penalty > 0:
        raise ParameterError("max_penalty", f"max_penalty ({max_penalty}) must not be positive")
    if ngram_size < 1:
        raise ParameterError("ngram_size", f"ngram_size ({ngram_size}) must be at least 1")


repetition_penalty_reward.check_values = check_values  # type: ignore[attr-defined]


def _repeated_share(ids: list[int], size: int) -> float:
    count = len(ids) - size + 1
    if count < 1:
        return 0.0
    distinct = set(zip(*(ids[start:] for start in range(size)), strict=False))
    return 1 - len(distinct) / count
