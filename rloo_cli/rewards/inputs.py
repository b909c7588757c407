"""What a built-in reward reads from its arguments: the text of a completion, the gold values of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GOLD_COLUMNS = ("solution", "answer", "ground_truth")
"""Where a gold answer is looked for, in this order, when the recipe names no column."""


class ParameterError(ValueError):
    """A value under `kwargs` in the recipe makes no sense; `parameter` is its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The completion's text: the string itself, or the content of the last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [] if isinstance(part, Mapping))


def gold_values(columns: Mapping[str, Any], column: str | None) -> list[Any]:
    """One gold value a row: of `column`, or the first of GOLD_COLUMNS that the row fills; None where a row has none.

    Raises ValueError where no such column exists.
    """
    names = [name for name in ([column] if column else GOLD_COLUMNS) if name in columns]
    if not names:
        wanted = repr(column) if column else "solution, answer or ground_truth"
        present = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"no column {wanted} with gold answers (columns: {present}); name it with kwargs: {{column: …}}")
    return [next((value for value in row if value is not None), None) for row in zip(*(columns[name] for name in names), strict=True)]


def gold_string(value: Any) -> str | None:
    """The gold value as text; None for what is no answer: null, NaN, lists, objects, blank strings."""
    if not isinstance(value, str | int | float) or value != value:
        return None
    return str(value).strip() or None


def check_gold(values: Sequence[Any], unusable: Mapping[int, str], *, what: str) -> list[str]:
    """Notices for the rows whose gold cannot be used: none, or one line with the count and three of them.

    Raises ValueError where they are more than one in a hundred: such a data set, or column, is the wrong one.
    """
    if not unusable:
        return []
    shown = "; ".join(f"row {row}: {reason}" for row, reason in list(unusable.items())[:3])
    message = f"{len(unusable):,} of {len(values):,} {what} cannot be used ({shown})"
    if len(unusable) > len(values) / 100:
        raise ValueError(f"{message}; more than 1 % is refused: name the right column with kwargs: {{column: …}}, or drop these rows")
    return [f"{message}; these rows stay unscored"]
