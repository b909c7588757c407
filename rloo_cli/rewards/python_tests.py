"""Reward for completions whose Python code passes the row's tests."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rloo_cli.rewards.inputs import ParameterError, check_gold, completion_text

LONGEST_PROGRAM = 100_000
"""Characters of code that are run; longer code fails every test."""

LEAST_MEMORY_MB = 64

_START_SECONDS = 30.0
_KILL_SECONDS = 20.0

_CHILD = Path(__file__).with_name("python_tests_child.py")
_PYTHON_BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


def python_tests_reward(
    completions: list[Any],
    column: str = "tests",
    score: Literal["fraction", "all"] = "fraction",
    seconds: float = 5.0,
    memory_mb: int = 1024,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """For each completion the share of its row's tests that its code passes, or with `score: all` 1.0 for all of them, else 0.0.

    The code is the last ```python block of the completion, or the whole completion. The tests are `column`: a list of
    strings, each a test of its own, or one string, each of whose assert statements is one. None where a row has no tests.

    THIS IS NO SANDBOX. The code runs as the user who trains, in a child process `python -I` with limits on CPU time, memory,
    processes and file size, an empty folder, a bare environment, and a deadline of `seconds` a completion. It can read
    the user's files and use the network, and code that sets out to can forge its result. docs/rewards.md says more.

    >>> python_tests_reward(["```python\\ndef f(x): return x + 1\\n```"], tests=[["assert f(1) == 2", "assert f(2) == 4"]])
    [0.5]
    """
    check_values(score, seconds, memory_mb)
    tests = [split_tests(value) for value in _column(kwargs, column)]
    programs = [
        {"code": extract_code(completion_text(completion))[: LONGEST_PROGRAM + 1], "tests": row_tests}
        for completion, row_tests in zip(completions, tests, strict=True)
    ]
    outcomes = _run(programs, seconds=seconds, memory_mb=memory_mb)
    if log_extra is not None:
        log_extra("python_tests", [note for _, note in outcomes])
    return [_scored(passed, len(row_tests), score) for (passed, _), row_tests in zip(outcomes, tests, strict=True)]


def extract_code(text: str) -> str:
    """The last ```python block, or else the last ``` block, or else the whole text. A block that nothing closes runs to the end."""
    labelled = list(_PYTHON_BLOCK.finditer(text))
    if labelled:
        return _FENCE.split(text[labelled[-1].end() :], maxsplit=1)[0]
    parts = _FENCE.split(text)
    return parts[-2].partition("\n")[2] if len(parts) >= 3 else text


def split_tests(value: Any) -> list[dict[str, Any]]:
    """What is run after the code, in order: `{"source": …, "is_test": …}`; empty where the row has no tests.

    Raises ValueError for a value that is neither a string nor a list of them, and for tests that are not Python.
    """
    if value is None:
        return []
    if isinstance(value, str):
        statements = [(ast.unparse(node), isinstance(node, ast.Assert)) for node in _parsed(value).body]
        # A string without an assert at its top (HumanEval's check(candidate)) is one test.
        if statements and not any(is_test for _, is_test in statements):
            return [{"source": value, "is_test": True}]
        return [{"source": source, "is_test": is_test} for source, is_test in statements]
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise ValueError(f"tests must be a string or a list of strings, got {value!r:.60}")
    for test in value:
        _parsed(test)
    return [{"source": test, "is_test": True} for test in value if test.strip()]


def check_rows(columns: Mapping[str, Sequence[Any]], column: str = "tests", **kwargs: Any) -> list[str]:
    """Notices about rows without usable tests. Raises ValueError where they are more than 1 %, or the column is missing."""
    values = _column(columns, column)
    problems = {row: problem for row, value in enumerate(values) if (problem := _problem(value))}
    return check_gold(values, problems, what=f"rows of tests in column {column!r}")


def check_values(score: str = "fraction", seconds: float = 5.0, memory_mb: int = 1024, **kwargs: Any) -> None:
    """Raise ParameterError for parameters that make no sense."""
    if score not in ("fraction", "all"):
        raise ParameterError("score", f"score must be fraction or all, got {score!r}")
    if seconds <= 0:
        raise ParameterError("seconds", f"seconds ({seconds}) must be positive")
    if memory_mb < LEAST_MEMORY_MB:
        raise ParameterError("memory_mb", f"memory_mb ({memory_mb}) must be at least {LEAST_MEMORY_MB}: Python itself takes that much")


python_tests_reward.check_rows = check_rows  # type: ignore[attr-defined]
python_tests_reward.check_values = check_values  # type: ignore[attr-defined]


def _column(columns: Mapping[str, Any], column: str) -> Sequence[Any]:
    if column not in columns:
        present = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"no column {column!r} with tests (columns: {present}); name it with kwargs: {{column: …}}")
    values: Sequence[Any] = columns[column]
    return values


def _problem(value: Any) -> str:
    try:
        return "" if split_tests(value) else "no tests"
    except ValueError as error:
        return str(error)


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source!r:.60} is not Python: {error}") from None


def _scored(passed: int, count: int, score: str) -> float | None:
    if count == 0:
        return None
    return passed / count if score == "fraction" else float(passed == count)


def _run(programs: list[dict[str, Any]], *, seconds: float, memory_mb: int) -> list[tuple[int, str]]:
    """Tests passed and a note such as "2 of 3 passed" for each program; they run one after the other in one child's children."""
    request = {"programs": programs, "seconds": seconds, "memory_mb": memory_mb}
    with tempfile.TemporaryDirectory(prefix="rloo-python-tests-", ignore_cleanup_errors=True) as folder:
        environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        child = subprocess.run(
            [sys.executable, "-I", str(_CHILD)],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            timeout=(seconds + _KILL_SECONDS) * len(programs) + _START_SECONDS,
            check=False,
        )
    if child.returncode == 0:
        return [(passed, note) for passed, note in json.loads(child.stdout)]
    if len(programs) == 1:
        return [(0, "ended the process that runs the tests")]
    return [_run([program], seconds=seconds, memory_mb=memory_mb)[0] for program in programs]
