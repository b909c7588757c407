"""Reward for completions that equal the row's answer."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from rloo_cli.rewards.inputs import check_gold, completion_text, gold_string, gold_values

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match_reward(
    completions: list[Any],
    column: str | None = None,
    after: str | None = None,
    strip: bool = True,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 for each completion that equals its row's gold answer, else 0.0; None where the row has no gold answer.

    The gold answer is `column`, or else the first of `solution`, `answer`, `ground_truth`. `after`: compare only what
    follows the last occurrence of this string (without it: 0.0). `strip`: white space at the ends does not count.

    >>> exact_match_reward(["<think>easy</think> Paris."], answer=["paris"], after="</think>", ignore_case=True, ignore_punctuation=True)
    [1.0]
    """

    def normalised(text: str) -> str:
        text = text.casefold() if ignore_case else text
        text = text.translate(_WITHOUT_PUNCTUATION) if ignore_punctuation else text
        return text.strip() if strip else text

    def score(completion: Any, value: Any) -> float | None:
        if gold_string(value) is None:
            return None
        text = completion_text(completion)
        if after is not None:
            _, found, text = text.rpartition(after)
            if not found:
                return 0.0
        return float(normalised(text) == normalised(str(value)))

    return [score(completion, value) for completion, value in zip(completions, gold_values(kwargs, column), strict=True)]


def check_rows(columns: Mapping[str, Sequence[Any]], column: str | None = None, **kwargs: Any) -> list[str]:
    """Notices about rows without a usable answer. Raises ValueError where they are more than 1 %, or the column is missing."""
    values = gold_values(columns, column)
    unusable = {row: f"{value!r:.60}" for row, value in enumerate(values) if gold_string(value) is None}
    return check_gold(values, unusable, what="gold answers")


exact_match_reward.check_rows = check_rows  # type: ignore[attr-defined]
