"""A JSON file of DeepSpeed's own: read within bounds, and the values of its `zero_optimization`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.nodes import Problems, printable
from rloo_cli.recipe.scalars import MAX_WHOLE
from rloo_cli.recipe.yaml_source import MAX_LEVELS, FileKind, read_text

KIND = FileKind(name="a file of DeepSpeed's own", form="JSON")

LEAST_COUNTS: Mapping[str, int] = {
    "allgather_bucket_size": 0,
    "reduce_bucket_size": 1,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "sub_group_size": 0,
    "zero_hpz_partition_size": 0,
}
"""Key of `zero_optimization` that counts → the least that DeepSpeed takes."""


class _RefusedJsonError(Exception):
    """JSON that readers understand differently, or not at all."""


def read_json(path: Path) -> Any:
    """What the file holds, `auto` and all.

    Raises:
        RecipeError: it cannot be read, is no regular file, is larger than a megabyte, is no JSON, or is nested too deeply.
    """
    problems, shown = Problems(), printable(str(path), 300)
    text = read_text(str(path), problems, KIND)
    if text is None:
        raise RecipeError(problems.lines()[0])
    try:
        document = json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{shown}:{error.lineno}:{error.colno}: not JSON: {error.msg}.") from error
    except _RefusedJsonError as error:
        raise RecipeError(f"{shown}: {error}") from error
    except ValueError as error:  # Python's own limit
        raise RecipeError(f"{shown}: it holds a number of thousands of digits.") from error
    except RecursionError as error:
        raise RecipeError(f"{shown}: {_TOO_DEEP}") from error
    if _is_too_deep(document):
        raise RecipeError(f"{shown}: {_TOO_DEEP}")
    return document


_TOO_DEEP = f"more than {MAX_LEVELS} levels of nesting."


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RefusedJsonError(f"the key `{printable(key)}` stands twice in one mapping.")
        found[key] = value
    return found


def _refuse_constant(word: str) -> Any:
    raise _RefusedJsonError(f"{word} is no JSON number.")


def _is_too_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_LEVELS + 1):
        level = [below for each in level for below in _below(each)]
        if not level:
            return False
    return True


def _below(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def refuse_wrong_counts(zero: Mapping[str, Any], path: Path) -> None:
    """Raise RecipeError where a key of `zero_optimization` that counts has a value that DeepSpeed would not take."""
    for key, least in LEAST_COUNTS.items():
        value = zero.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_WHOLE:
            said = printable(json.dumps(value), 40)
            raise RecipeError(f'{path}: zero_optimization.{key}: {said} is neither a whole number from {least} on nor "auto".')
