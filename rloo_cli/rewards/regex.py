"""Reward for completions that match a regular expression."""

from __future__ import annotations

import re
from typing import Any, Literal

from rloo_cli.rewards.inputs import ParameterError, completion_text


def regex_reward(completions: list[Any], pattern: str, match: Literal["partial", "full"] = "partial", **kwargs: Any) -> list[float]:
    """1.0 for each completion in which `pattern` (Python's re) is found, else 0.0.

    `match`: "partial" finds it anywhere, "full" wants the whole completion. Flags go into the pattern: `(?is)`.
    Raises ValueError for a pattern that does not compile. A pattern that backtracks without end is ended by the
    reward's `timeout`.

    >>> regex_reward(["The answer is 42", "no"], pattern=r"\\d+$")
    [1.0, 0.0]
    """
    check_values(pattern, match)
    compiled = re.compile(pattern)
    matches = compiled.search if match == "partial" else compiled.fullmatch
    return [float(matches(completion_text(completion)) is not None) for completion in completions]


def check_values(pattern: str, match: str = "partial", **kwargs: Any) -> None:
    """Raise ParameterError for parameters that make no sense."""
    if match not in ("partial", "full"):
        raise ParameterError("match", f"match must be partial or full, got {match!r}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ParameterError("pattern", f"pattern {pattern!r:.80} is no regular expression: {error}") from error


regex_reward.check_values = check_values  # type: ignore[attr-defined]
