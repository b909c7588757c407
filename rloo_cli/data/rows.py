"""Rows of a split as they were read: columns by name, and where each row stands.

Two stores with one face: Python lists for files that we read ourselves (columns of any mixture of types), and an Arrow
table, memory-mapped where it can be, for everything else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rloo_cli.data.values import json_value

if TYPE_CHECKING:
    import pyarrow as pa


class Rows(Protocol):
    """A split: `len()` rows, each a mapping from every column to a JSON-able value (None where the row lacks it)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int, without: str | None = None) -> dict[str, Any]:
        """All columns of one row but the one that is named."""
        ...

    def cell(self, index: int, name: str) -> Any:
        """One cell as it was read, which may hold bytes."""
        ...

    def column(self, name: str) -> list[Any]:
        """All rows of one column."""
        ...

    def place(self, index: int) -> str:
        """Where a row stands: `file:line` or `dataset:split row N`."""
        ...

    def binary_columns(self) -> dict[str, str]:
        """Columns that cannot be written as JSON → what they hold."""
        ...


@dataclass(slots=True, kw_only=True)
class ListRows:
    """Rows read from text files, which may come in several shards."""

    names: list[str] = field(default_factory=list)
    """File of each shard, as messages name it."""
    first_rows: list[int] = field(default_factory=list)
    """First row of each shard."""
    lines: array[int] = field(default_factory=lambda: array("q"))
    """Line in its file at which each row starts, from 1."""
    values: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order of appearance."""
        return tuple(self.values)

    def __len__(self) -> int:
        return len(self.lines)

    def begin_file(self, name: str) -> None:
        """Rows that follow belong to this file."""
        self.names.append(name)
        self.first_rows.append(len(self))

    def append(self, line: int, row: Mapping[str, Any]) -> None:
        """Add a row; columns that it lacks become None, columns that earlier rows lack too."""
        count = len(self.lines)
        for name, value in row.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = [None] * count
            column.append(value)
        self.lines.append(line)
        if len(row) < len(self.values):
            for column in self.values.values():
                if len(column) == count:
                    column.append(None)

    def row(self, index: int, without: str | None = None) -> dict[str, Any]:
        """All columns of one row but the one that is named."""
        return {name: column[index] for name, column in self.values.items() if name != without}

    def cell(self, index: int, name: str) -> Any:
        """One cell as it was read."""
        return self.values[name][index]

    def column(self, name: str) -> list[Any]:
        """All rows of one column."""
        return self.values[name]

    def place(self, index: int) -> str:
        """`file:line` of a row."""
        return f"{self.names[bisect_right(self.first_rows, index) - 1]}:{self.lines[index]}"

    def binary_columns(self) -> dict[str, str]:
        """None: text files hold no binary values."""
        return {}


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of an Arrow table; row numbers count from 0, as `dataset[N]` does."""

    table: pa.Table
    name: str
    first: int = 0
    """The number of the table's first row, where it is a part."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, index: int, without: str | None = None) -> dict[str, Any]:
        """All columns of one row but the one that is named."""
        row_table = self.table.slice(index, 1)
        (row,) = (row_table if without is None else row_table.drop_columns([without])).to_pylist()
        return {name: json_value(value) for name, value in row.items()}

    def cell(self, index: int, name: str) -> Any:
        """One cell as it was read, which may hold bytes."""
        return self.table.column(name)[index].as_py()

    def column(self, name: str) -> list[Any]:
        """All rows of one column."""
        values: Sequence[Any] = self.table.column(name).to_pylist()
        return [json_value(value) for value in values]

    def place(self, index: int) -> str:
        """`name row N`."""
        return f"{self.name} row {self.first + index}"

    def binary_columns(self) -> dict[str, str]:
        """Columns with bytes anywhere in their type → "images or audio" or "binary data"."""
        return {field.name: what for field in self.table.schema if (what := _binary_kind(field.type))}


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows with some of their columns."""

    inner: Rows
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inner)

    def row(self, index: int, without: str | None = None) -> dict[str, Any]:
        """The selected columns of one row but the one that is named; None for one that the rows lack."""
        found = self.inner.row(index, without)
        return {name: found.get(name) for name in self.columns if name != without}

    def cell(self, index: int, name: str) -> Any:
        """One cell as it was read."""
        return self.inner.cell(index, name)

    def column(self, name: str) -> list[Any]:
        """All rows of one column."""
        return self.inner.column(name) if name in self.inner.columns else [None] * len(self)

    def place(self, index: int) -> str:
        """Where a row stands."""
        return self.inner.place(index)

    def binary_columns(self) -> dict[str, str]:
        """Those of the selected columns that cannot be written as JSON."""
        return {name: what for name, what in self.inner.binary_columns().items() if name in self.columns}


def _binary_kind(kind: pa.DataType) -> str | None:
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return "binary data"
    children = [kind.field(i) for i in range(kind.num_fields)] if types.is_nested(kind) else []
    if {child.name for child in children} >= {"bytes", "path"}:
        return "images or audio"
    return next((what for child in children if (what := _binary_kind(child.type))), None)
