"""Values of Python programs as a recipe can hold them."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

from rloo_cli.errors import RecipeError

CONFIG = "RLOOConfig"
"""How errors call the place of a field that a Python program gave."""


def plain(name: str, value: Any) -> Any:
    """The value as texts, numbers, lists and dictionaries: paths and enums by their text, `torch.bfloat16` as `bfloat16`.

    Raises:
        RecipeError: it is an object that no file can hold.
    """
    if isinstance(value, enum.Enum):
        return plain(name, value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(name, item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(name, item) for item in value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return plain(name, value.item())
    raise RecipeError(f"{CONFIG}: {name}: {type(value).__module__}.{type(value).__name__} is an object that no recipe can hold.")
