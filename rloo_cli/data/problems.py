"""Collects what is wrong with the rows of a data set, so that one run shows all of it."""

from __future__ import annotations

import os
from pathlib import Path

from rloo_cli.errors import DataError

SHOWN = 10
"""Bad rows that a message lists; the rest is counted."""
MAX_QUOTED = 60
"""Characters of a value that a message quotes."""


class Problems:
    """Bad rows: the first ten in words, all of them counted."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0

    def add(self, place: str, what: str) -> None:
        """Note that the row at `place` (`file:line` or `dataset:split row N`) cannot be used."""
        self._count += 1
        if len(self._lines) < SHOWN:
            self._lines.append(f"{place}: {what}")

    def __len__(self) -> int:
        return self._count

    def raise_if_any(self, remedy: str = "") -> None:
        """Raise what was collected.

        Raises:
            DataError: one line a row, the count of the rest, and the remedy.
        """
        if not self._count:
            return
        lines = list(self._lines)
        if self._count > len(lines):
            lines.append(f"… and {self._count - len(lines)} more rows; {self._count} in all.")
        raise DataError("\n".join([*lines, remedy] if remedy else lines))


def quote(value: object) -> str:
    """The value as Python writes it, cut to a length that fits a line."""
    text = repr(value[:MAX_QUOTED]) if isinstance(value, str) else repr(value)
    whole = len(value) if isinstance(value, str) else len(text)
    return text if whole <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def show_path(path: Path) -> str:
    """The path as a reader would type it: relative where it lies below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def name_columns(columns: tuple[str, ...]) -> str:
    """The columns in one short phrase."""
    shown = [" ".join(name.split()) for name in columns[:20]]
    return ", ".join([*shown, "…"] if len(columns) > 20 else shown)
