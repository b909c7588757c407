"""Reads .jsonl, .json and .csv files row by row, knowing the line of each: a bad row is named, not the file.

A byte order mark is tolerated, blank lines are skipped, CRLF and LF are the same, a column that a row lacks is None.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.data.problems import Problems, quote
from rloo_cli.data.rows import ListRows
from rloo_cli.errors import DataError

BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
WHITESPACE = re.compile(r"[ \t\r\n]*")
CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")
CANONICAL_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
LONGEST_LINE = 1 << 30
"""Bytes; a .json file may have all of its rows on one line."""
LARGEST_CELL = 2**31 - 1
"""Characters of a CSV cell; the module's own limit of 131,072 is smaller than a long solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file on its way into `rows`."""

    path: Path
    name: str
    """The file in messages."""
    rows: ListRows
    problems: Problems
    prompt_column: str
    """Stays text in a CSV file, whatever it looks like."""
    limit: int | None
    """Rows to read, of all files in `rows` together and bad ones included."""

    def read(self) -> None:
        """Append the rows, and note the lines that hold none.

        Raises:
            DataError: the file cannot be read, or its header is wrong.
        """
        self.rows.begin_file(self.name)
        try:
            self.refuse_utf16()
            READERS[self.path.suffix](self)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror or error}") from error

    def refuse_utf16(self) -> None:
        """Raise DataError for the other Unicode, which spreadsheets write."""
        with self.path.open("rb") as file:
            if file.read(2) in UTF16_MARKS:
                raise DataError(f"{self.name}: UTF-16 text; save it as UTF-8.")

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number from 1, text with its line end). Bytes are split before decoding: U+2028 ends no line."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{self.name}:{number}: a line of more than {LONGEST_LINE >> 20} MiB; that is no text file with a row a line."
                    )
                raw = raw.removeprefix(BOM) if number == 1 else raw
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    self.fail(number, f"not UTF-8: byte {raw[error.start]:#04x} at byte {error.start + 1} of the line")
                    text = "\n"
                yield number, text

    def add(self, line: int, value: Any) -> None:
        """Append one parsed row, or note why it is none."""
        if not isinstance(value, dict):
            self.fail(line, f"expected an object with columns, got {quote(value)}")
        elif _has_lone_surrogate(value):
            self.fail(line, "holds half of a surrogate pair (\\ud800 to \\udfff), which no text encoding can write")
        else:
            self.rows.append(line, value)

    def fail(self, line: int, what: str) -> None:
        """Note a bad line."""
        self.problems.add(f"{self.name}:{line}", what)

    def is_full(self) -> bool:
        """Whether enough rows were read."""
        return self.limit is not None and len(self.rows) + len(self.problems) >= self.limit


def _read_jsonl(file: TextFile) -> None:
    for line, text in file.lines():
        if file.is_full():
            return
        if text.strip():
            add_jsonl_line(file, line, text)


def add_jsonl_line(file: TextFile, line: int, text: str) -> None:
    """Append the row on a line that is not blank, or note why it is none."""
    try:
        value = _DECODER.decode(text.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        file.fail(line, f"not JSON: {_reason(error)}")
    else:
        file.add(line, value)


def _read_json(file: TextFile) -> None:
    """Rows of one array of objects, or of objects one after another (JSON lines, however they are laid out)."""
    bad_lines = len(file.problems)
    text = "".join(line for _, line in file.lines())
    if len(file.problems) > bad_lines:
        return None
    position, line = _skip(text, 0, 1)
    is_array = text.startswith("[", position)
    if is_array:
        position, line = _skip(text, position + 1, line)
    while not file.is_full() and (position < len(text) or is_array):
        if is_array and text.startswith("]", position):
            position, line = _skip(text, position + 1, line)
            return file.fail(line, "not JSON: something follows the array of rows") if position < len(text) else None
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            where = error.lineno if isinstance(error, json.JSONDecodeError) else line
            return file.fail(where, f"not JSON: {_reason(error)}")  # where the next value starts cannot be known
        file.add(line, value)
        position, line = _skip(text, end, line + text.count("\n", position, end))
        if is_array and text.startswith(",", position):
            position, line = _skip(text, position + 1, line)
        elif is_array and not text.startswith("]", position):
            return file.fail(line, "not JSON: expected `,` or `]` after a row")
    return None


def _read_csv(file: TextFile) -> None:
    """Rows below the header. A column of nothing but whole numbers, or nothing but decimals, becomes numbers; an empty cell is None."""
    csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader((text for _, text in file.lines()), strict=True)
    header: list[str] = []
    first = len(file.rows)
    while not file.is_full():
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            file.fail(line, f"not CSV: {error}")
            continue
        if cells is None:
            break
        if not header:
            header = _check_header(cells, f"{file.name}:{line}")
        elif cells and len(cells) != len(header):
            file.fail(line, f"{len(cells)} cells where the header has {len(header)}")
        elif cells:
            file.rows.append(line, {column: cell or None for column, cell in zip(header, cells, strict=True)})
    for column in header:
        if column != file.prompt_column and column in file.rows.values:
            _infer_numbers(file.rows.values[column], first)


READERS: dict[str, Callable[[TextFile], None]] = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
"""File extension → reader."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these members; JSON parsers keep the last of two equal names without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {quote(name)} stands twice in an object")
    return made


def _refuse_constant(name: str) -> None:
    """NaN is pandas' missing number and read as None; JSON has no infinities."""
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]


def _has_lone_surrogate(value: Any) -> bool:
    """Whether a string within cannot be encoded; pure ASCII, the common case, is decided without encoding."""
    if isinstance(value, str):
        if value.isascii():
            return False
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
        return False
    if isinstance(value, dict):
        return any(_has_lone_surrogate(key) or _has_lone_surrogate(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_lone_surrogate(item) for item in value)


def _skip(text: str, position: int, line: int) -> tuple[int, int]:
    """The next position that is no white space, and its line."""
    match = WHITESPACE.match(text, position)
    end = match.end() if match else position
    return end, line + text.count("\n", position, end)


def _check_header(cells: list[str], place: str) -> list[str]:
    doubled = sorted({cell for cell in cells if cells.count(cell) > 1})
    if doubled:
        raise DataError(f"{place}: the header names `{doubled[0]}` twice.")
    return cells


def _infer_numbers(column: list[Any], first: int) -> None:
    """Turn the cells from row `first` on into numbers, where every one of them is written as Python would write it."""
    cells = [cell for cell in column[first:] if cell is not None]
    for pattern, convert in ((CANONICAL_INT, int), (CANONICAL_FLOAT, float)):
        if cells and all(pattern.fullmatch(cell) for cell in cells):
            column[first:] = [None if cell is None else convert(cell) for cell in column[first:]]
            return
