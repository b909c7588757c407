"""Rows of a split a window at a time, for splits that are larger than memory: .jsonl, .parquet, saved `datasets` folders, hub ids."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rloo_cli.data.hub import stream_hub_tables
from rloo_cli.data.problems import Problems, show_path
from rloo_cli.data.rows import ListRows, Rows, SelectedRows, TableRows
from rloo_cli.data.sources import SplitPlace, load_saved_table, locate_split
from rloo_cli.data.text_files import TextFile, add_jsonl_line
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import DataSection

if TYPE_CHECKING:
    import pyarrow as pa

READ_ROWS = 1024
"""Rows of a table that are in memory at once, beside a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Neighbouring rows, and the section by which they are read (that of their set, in a mixture)."""

    rows: Rows
    data: DataSection


class RowStream(Protocol):
    """One pass over a split, from its first row on. Windows have the same borders whether they are read or skipped."""

    def read(self, count: int) -> Window | None:
        """The next rows, `count` of them but for the last window of a set; None at the end. Raises DataError for rows that cannot be read."""
        ...

    def skip(self, count: int) -> int:
        """As `read`, for who needs no rows: how many they are, 0 at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSplit:
    """A split that can be passed over again and again."""

    open: Callable[[], RowStream]
    identity: str
    """Tells one from another as far as that is known without reading it: the sizes of its files."""


def open_split(data: DataSection, split: str, *, columns: Sequence[str] | None = None, limit: int | None = None) -> StreamedSplit:
    """The split as a stream of its first `limit` rows, of these `columns` alone (None = all).

    Raises:
        RecipeError: the data set or split does not exist, or its format cannot be read in pieces.
    """
    place = locate_split(data, split)
    suffix = place.paths[0].suffix if place.kind == "files" else ""
    if place.kind == "files" and suffix not in (".jsonl", ".parquet"):
        raise RecipeError(
            f"data.dataset_streaming: {show_path(place.paths[0])}: a {suffix or 'nameless'} file is read as a whole; save it as .jsonl or .parquet, or "
            "leave dataset_streaming out."
        )
    inner: Callable[[], RowStream]
    if suffix == ".jsonl":
        inner = lambda: _JsonlStream(place.paths, data)  # noqa: E731
    else:
        inner = lambda: _TableStream(_tables(place, data, split), data, place.name)  # noqa: E731
    sizes = [path.stat().st_size for path in place.paths] if place.kind == "files" else []
    return StreamedSplit(
        open=lambda: _Selected(inner(), columns, limit), identity=hashlib.sha256(repr((place.kind, sizes)).encode()).hexdigest()
    )


def chain(splits: Sequence[StreamedSplit]) -> StreamedSplit:
    """One split after the other; no window holds rows of two."""
    return StreamedSplit(open=lambda: _Chained([split.open for split in splits]), identity=" ".join(split.identity for split in splits))


class _JsonlStream:
    def __init__(self, paths: Sequence[Path], data: DataSection) -> None:
        self._data = data
        self._problems = Problems()
        self._lines = itertools.chain.from_iterable(map(self._lines_of, paths))

    def _lines_of(self, path: Path) -> Iterator[tuple[TextFile, int, str]]:
        file = TextFile(
            path=path, name=show_path(path), rows=ListRows(), problems=self._problems, prompt_column=self._data.prompt_column, limit=None
        )
        file.refuse_utf16()
        for line, text in file.lines():
            if text.strip():
                yield file, line, text

    def read(self, count: int) -> Window | None:
        rows = ListRows()
        for file, line, text in itertools.islice(self._lines, count):
            if not rows.names or rows.names[-1] != file.name:
                rows.begin_file(file.name)
            add_jsonl_line(replace(file, rows=rows), line, text)
        self._problems.raise_if_any()
        return Window(rows=rows, data=self._data) if len(rows) else None

    def skip(self, count: int) -> int:
        return sum(1 for _ in itertools.islice(self._lines, count))


class _TableStream:
    """Tables of any number of rows, cut into windows."""

    def __init__(self, tables: Iterator[pa.Table], data: DataSection, name: str) -> None:
        self._tables = tables
        self._data = data
        self._name = name
        self._left: pa.Table | None = None
        self._row = 0

    def read(self, count: int) -> Window | None:
        import pyarrow as pa

        first, pieces = self._row, list(self._pieces(count))
        if not pieces:
            return None
        try:
            table = pa.concat_tables(pieces, promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{self._name}: its columns change their types at row {first} or later: {str(error).splitlines()[0]}"
            ) from error
        return Window(rows=TableRows(table, self._name, first), data=self._data)

    def skip(self, count: int) -> int:
        return sum(piece.num_rows for piece in self._pieces(count))

    def _pieces(self, count: int) -> Iterator[pa.Table]:
        while count:
            if self._left is None or not self._left.num_rows:
                self._left = next(self._tables, None)
                if self._left is None:
                    return
            piece, self._left = self._left.slice(0, count), self._left.slice(count)
            count -= piece.num_rows
            self._row += piece.num_rows
            if piece.num_rows:
                yield piece


class _Selected:
    def __init__(self, inner: RowStream, columns: Sequence[str] | None, limit: int | None) -> None:
        self._inner = inner
        self._columns = columns
        self._left = limit

    def read(self, count: int) -> Window | None:
        window = self._inner.read(self._most(count))
        if window is None:
            return None
        self._note(len(window.rows))
        return window if self._columns is None else replace(window, rows=SelectedRows(window.rows, tuple(self._columns)))

    def skip(self, count: int) -> int:
        skipped = self._inner.skip(self._most(count))
        self._note(skipped)
        return skipped

    def _most(self, count: int) -> int:
        return count if self._left is None else min(count, self._left)

    def _note(self, count: int) -> None:
        self._left = None if self._left is None else self._left - count


class _Chained:
    def __init__(self, openers: Sequence[Callable[[], RowStream]]) -> None:
        self._streams = (opener() for opener in openers)
        self._stream = next(self._streams, None)

    def read(self, count: int) -> Window | None:
        while self._stream is not None:
            window = self._stream.read(count)
            if window is not None:
                return window
            self._stream = next(self._streams, None)
        return None

    def skip(self, count: int) -> int:
        while self._stream is not None:
            skipped = self._stream.skip(count)
            if skipped:
                return skipped
            self._stream = next(self._streams, None)
        return 0


def _tables(place: SplitPlace, data: DataSection, split: str) -> Iterator[pa.Table]:
    if place.kind == "files":
        return _parquet_tables(place.paths)
    if place.kind == "saved":  # lies in mapped files; of a slice only what is read comes into memory
        return iter([load_saved_table(place.paths[0], place.name)])
    assert data.dataset_name is not None
    return stream_hub_tables(data.dataset_name, config=data.dataset_config, split=split, rows=READ_ROWS)


def _parquet_tables(paths: Sequence[Path]) -> Iterator[pa.Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=READ_ROWS):
                    batch.validate(full=True)
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{show_path(path)}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
