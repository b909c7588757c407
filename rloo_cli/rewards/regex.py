"""Reward for completions that match a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from rloo_cli.rewards.inputs import completion_text


def regex_reward(completions: list[Any], pattern: str, match: Literal["partial", "full"] = "partial", **kwargs: Any) -> list[float]:
    """1.0 for each completion in which `pattern` (Python's re) is found, else 0.0.

    `match`: "partial" finds it anywhere, "full" wants the whole completion. Flags go into the pattern: `(?is)`.
    Raises ValueError for a pattern that does not compile. A pattern that backtracks without end is ended by the
    reward's `timeout`.

    >>> regex_reward(["The answer is 42", "no"], pattern=r"\\d+$")
    [1.0, 0.0]
    """
    if match not in ("partial", "full"):
        raise ValueError(f"match must be partial or full, got {match!r}")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    matches = compiled.search if match == "partial" else compiled.fullmatch
    return [float(matches(completion_text(completion)) is not None) for completion in completions]


def check_rows(columns: Mapping[str, Any], **kwargs: Any) -> list[str]:
    """No notices. Raises ValueError for parameters that make no sense, before the first completion is made."""
    regex_reward([], **kwargs)
    return []


regex_reward.check_rows = check_rows  # type: ignore[attr-defined]
