"""Reward functions that a Python program gave as objects, and that no other process can import: lambdas, cells of a notebook.

They exist in this process alone, by names that a recipe can hold: `rloo_cli.rewards.given.NAME`, with `run_in: trainer`. An import of the
name finds them as it finds any other function.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MODULE = __name__
_GIVEN: dict[str, Callable[..., Any]] = {}


@contextlib.contextmanager
def given(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Has these functions found by their names for the block."""
    before = dict(_GIVEN)
    _GIVEN.update(functions)
    try:
        yield
    finally:
        _GIVEN.clear()
        _GIVEN.update(before)


def dotted(name: str) -> str:
    """What a recipe calls the function that was given by this name."""
    return f"{MODULE}.{name}"


def is_given(module: str) -> bool:
    """Whether functions of this module were given as objects."""
    return module == MODULE


def place_of(name: str) -> tuple[str, int] | None:
    """(file, line) where a given function is written, as far as it tells; None where none of that name was given."""
    function = _GIVEN.get(name)
    if function is None:
        return None
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else (f"<{type(function).__name__}>", 1)


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _GIVEN:
        return _GIVEN[name]
    raise AttributeError(f"no function `{name}` was given in this process")
