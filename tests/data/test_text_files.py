from __future__ import annotations

import json

import pytest

from rloo_cli.data import text_files
from rloo_cli.data.problems import Problems
from rloo_cli.data.rows import ListRows
from rloo_cli.data.text_files import TextFile
from rloo_cli.errors import DataError


def read(tmp_path, name, content, *, limit=None):
    """(rows as dicts, first lines, message of the bad rows or None)"""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows, problems = ListRows(), Problems()
    TextFile(path=path, name=name, rows=rows, problems=problems, prompt_column="prompt", limit=limit).read()
    message = None
    try:
        problems.raise_if_any()
    except DataError as error:
        message = error.message
    return [rows.row(i) for i in range(len(rows))], list(rows.lines), message


def test_jsonl_with_mark_blank_lines_crlf_and_missing_columns(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "a", "n": 1}\r\n\r\n  \n{"prompt": "b\xe2\x80\xa8c"}\n{"m": [2]}'
    rows, lines, message = read(tmp_path, "x.jsonl", content)
    assert rows == [
        {"prompt": "a", "n": 1, "m": None},
        {"prompt": "b\u2028c", "n": None, "m": None},
        {"prompt": None, "n": None, "m": [2]},
    ]
    assert lines == [1, 4, 5]
    assert message is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a" 1}', "x.jsonl:2: not JSON: expecting ':' delimiter at column 6"),
        (b'{"a": 1', "x.jsonl:2: not JSON: expecting ',' delimiter at column 8"),
        (b"[1, 2]", "x.jsonl:2: expected an object with columns, got [1, 2]"),
        (b'{"a": -Infinity}', "x.jsonl:2: not JSON: -Infinity is not a JSON number"),
        (b'{"a": 1e999}', "x.jsonl:2: not JSON: 1e999 is too large for a number"),
        (b"\xe9", "x.jsonl:2: not UTF-8: byte 0xe9 at byte 1 of the line"),
        (b"[" * 100_000, "x.jsonl:2: not JSON: nested too deeply"),
        (b'{"a": "\\ud800"}', "x.jsonl:2: holds half of a surrogate pair (\\ud800 to \\udfff), which no text encoding can write"),
        (
            b'{"a": ' + b"9" * 5000 + b"}",
            "x.jsonl:2: not JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, message):
    rows, lines, found = read(tmp_path, "x.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 2}\n')
    assert ([row["a"] for row in rows], lines, found) == ([0, 2], [1, 3], message)


def test_nan_is_a_missing_value(tmp_path):
    assert read(tmp_path, "x.jsonl", '{"a": NaN}')[0] == [{"a": None}]


def test_json_array_knows_its_lines(tmp_path):
    rows, lines, message = read(tmp_path, "x.json", '\n[\n{"a": 1},\n {"a":\n 2},\n3, {"a": 4}\n]\n')
    assert ([row["a"] for row in rows], lines, message) == ([1, 2, 4], [3, 4, 6], "x.json:6: expected an object with columns, got 3")


def test_json_file_of_json_lines(tmp_path):
    assert read(tmp_path, "x.json", '{"a": 1}\n\n{"a": 2}\n')[:2] == ([{"a": 1}, {"a": 2}], [1, 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},', "x.json:1: not JSON: expecting value at column 11"),
        ('[{"a": 1}', "x.json:1: not JSON: expected `,` or `]` after a row"),
        ('[{"a": 1}\n{"a": 2}]', "x.json:2: not JSON: expected `,` or `]` after a row"),
        ('[{"a": 1}]\nx', "x.json:2: not JSON: something follows the array of rows"),
        ('[{"a": 1},\n{"a": ]', "x.json:2: not JSON: expecting value at column 7"),
    ],
)
def test_broken_json_file(tmp_path, content, message):
    assert read(tmp_path, "x.json", content)[2] == message


def test_csv_keeps_lines_through_quoted_line_breaks_and_infers_numbers(tmp_path):
    content = 'prompt,whole,decimal,code,mixed\r\n1,2,0.5,007,1\r\n"a\nb",-3,1.25,1,x\r\n\r\n5,,,,\r\n'
    rows, lines, message = read(tmp_path, "x.csv", content)
    assert rows == [
        {"prompt": "1", "whole": 2, "decimal": 0.5, "code": "007", "mixed": "1"},
        {"prompt": "a\nb", "whole": -3, "decimal": 1.25, "code": "1", "mixed": "x"},
        {"prompt": "5", "whole": None, "decimal": None, "code": None, "mixed": None},
    ]
    assert (lines, message) == ([2, 3, 6], None)


def test_bad_csv_rows(tmp_path):
    rows, _, message = read(tmp_path, "x.csv", 'a,b\n1\n"a"b,1\n1,2\n"open')
    assert rows == [{"a": 1, "b": 2}]
    assert message.splitlines() == [
        "x.csv:2: 1 cells where the header has 2",
        "x.csv:3: not CSV: ',' expected after '\"'",
        "x.csv:5: not CSV: unexpected end of data",
    ]


def test_csv_header_twice(tmp_path):
    with pytest.raises(DataError, match=r"x.csv:1: the header names `a` twice"):
        read(tmp_path, "x.csv", "a,a\n1,2\n")


def test_csv_cell_of_a_megabyte(tmp_path):
    assert read(tmp_path, "x.csv", "prompt\n" + "y" * 10**6)[0] == [{"prompt": "y" * 10**6}]


def test_utf16_is_named(tmp_path):
    with pytest.raises(DataError, match="UTF-16"):
        read(tmp_path, "x.jsonl", '{"a": 1}'.encode("utf-16"))


def test_limit_leaves_what_follows_unread(tmp_path):
    for name in ("x.jsonl", "x.json"):
        rows, _, message = read(tmp_path, name, '{"a": 1}\n{"a": 2}\nbroken', limit=2)
        assert (len(rows), message) == (2, None)


def test_only_ten_bad_rows_are_listed(tmp_path):
    message = read(tmp_path, "x.jsonl", "[]\n" * 25)[2].splitlines()
    assert len(message) == 11
    assert message[-1] == "… and 15 more rows; 25 in all."


def test_mixed_types_in_a_column_stay_as_they_are(tmp_path):
    values = [1, "1", None, [1], {"k": 1.5}, True]
    rows = read(tmp_path, "x.jsonl", "\n".join(json.dumps({"a": value}) for value in values))[0]
    assert [row["a"] for row in rows] == values


def test_a_name_that_stands_twice_in_an_object(tmp_path):
    rows, _, message = read(tmp_path, "x.jsonl", '{"a": 1, "b": 2, "a": 3}\n{"m": [{"x": 1, "x": 2}]}\n{"a": 1}\n')
    assert (
        message
        == "x.jsonl:1: not JSON: the name 'a' stands twice in an object\nx.jsonl:2: not JSON: the name 'x' stands twice in an object"
    )
    assert rows == [{"a": 1}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_line_without_end_is_not_read_whole(tmp_path, name, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    with pytest.raises(DataError, match=f"{name}:2: a line of more than 0 MiB"):
        read(tmp_path, name, b"\n" + b"x" * 2000)
