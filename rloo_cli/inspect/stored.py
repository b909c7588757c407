"""Rollout files read back: tables, groups, completions. What a file does not say is None."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import RecipeError, RefusedError, StorageError
from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.rollouts import COLUMNS
from rloo_cli.types import PromptContent

if TYPE_CHECKING:
    import pyarrow as pa

REWARDS, EXTRA = "rewards/", "extra/"
NEEDED = ("prompt_row", "completion")
"""Columns without which a file is none of ours; every other one may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCompletion:
    """One row; run/rollouts.py tells what each value means."""

    text: str | None
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    weights_version: int | None
    reward: float | None
    kl: float | None
    advantage: float | None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By name of the reward function."""
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Its length."""
        return None if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image of a prompt."""

    data: bytes = field(repr=False)
    """Of its file."""
    name: str
    """The path that the data set gave; empty where it held bytes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A prompt and its completions, in order."""

    index: int
    """Place in its file, from 0."""
    first_row: int
    """Row of its first completion in the file."""
    step: int | None
    prompt_row: int | None
    prompt: PromptContent | None
    prompt_text: str | None
    completions: tuple[StoredCompletion, ...]
    images: tuple[StoredImage, ...] = ()
    """Of the prompt."""

    @property
    def key(self) -> str:
        """The prompt as text: equal for the same prompt in two files."""
        return json.dumps(self.prompt, sort_keys=True)

    @property
    def mean_reward(self) -> float | None:
        """Over the completions whose reward is known."""
        known = [completion.reward for completion in self.completions if completion.reward is not None]
        return sum(known) / len(known) if known else None


def read_table(file: RolloutFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The file as an Arrow table; `columns`: the start of the names of those that are read, None = all.

    Raises:
        StorageError: it cannot be read.
        RefusedError: it is a parquet file, but no rollouts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.path.is_file():  # a pipe would be waited for
        raise StorageError(f"{file.path}: not a readable rollout file (a folder, a pipe, a device or a broken link).")
    try:
        parquet = pq.ParquetFile(file.path)
        names = parquet.schema_arrow.names
        _check_schema(file.path, parquet.schema_arrow)
        table = parquet.read(columns=[name for name in names if columns is None or name.startswith(tuple(columns))], use_threads=False)
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StorageError(f"{file.path}: not a readable rollout file ({reason}).") from error


def read_groups(file: RolloutFile) -> list[StoredGroup]:
    """Every group of the file, in order. Raises as `read_table`."""
    rows = read_table(file).to_pylist()
    return [_group(rows, start, end, index) for index, (start, end) in enumerate(group_bounds([row["prompt_row"] for row in rows], file))]


def group_bounds(prompt_rows: Sequence[int | None], file: RolloutFile) -> list[tuple[int, int]]:
    """First row and end of each group: rows of one prompt that follow each other, cut into groups of the recipe's size."""
    size = group_size(file)
    bounds = []
    start = 0
    for end in range(1, len(prompt_rows) + 1):
        if end == len(prompt_rows) or prompt_rows[end] != prompt_rows[start]:
            width = size if size and (end - start) % size == 0 else end - start
            bounds += [(first, first + width) for first in range(start, end, width)]
            start = end
    return bounds


def group_size(file: RolloutFile) -> int | None:
    """Completions of a prompt, as the recipe beside the file says; None where there is none to read."""
    recipe = run_recipe(file.run.recipe)
    if recipe is None:
        return None
    return recipe.evaluation.num_generations_eval if file.kind is RolloutKind.EVAL else recipe.generation.num_generations


@functools.lru_cache(maxsize=8)
def run_recipe(path: Path) -> Recipe | None:
    """The recipe of a run as it was resolved; None where there is none that can be read."""
    try:
        return load_recipe(path).recipe
    except RecipeError:
        return None


def failure_facts(file: RolloutFile) -> dict[str, Any]:
    """What was noted beside a batch that a run stopped at; empty for every other file."""
    if file.kind is not RolloutKind.FAILED:
        return {}
    path = file.path.with_suffix(".json")
    try:
        facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _group(rows: Sequence[Mapping[str, Any]], start: int, end: int, index: int) -> StoredGroup:
    first = rows[start]
    return StoredGroup(
        index=index,
        first_row=start,
        step=first.get("step"),
        prompt_row=first["prompt_row"],
        prompt=_prompt(first.get("prompt")),
        prompt_text=first.get("prompt_text"),
        completions=tuple(_completion(row) for row in rows[start:end]),
        images=tuple(_images(first.get("images") or ())),
    )


def _images(cells: Sequence[Mapping[str, Any]]) -> Iterator[StoredImage]:
    for cell in cells:
        data = cell.get("bytes")
        yield StoredImage(data=data if isinstance(data, bytes) else b"", name=str(cell.get("path") or ""))


def _completion(row: Mapping[str, Any]) -> StoredCompletion:
    ids, logprobs = row.get("completion_ids"), row.get("logprobs")
    return StoredCompletion(
        text=row["completion"],
        token_ids=None if ids is None else tuple(ids),
        logprobs=None if logprobs is None else tuple(logprobs),
        finish_reason=row.get("finish_reason"),
        weights_version=row.get("weights_version"),
        reward=row.get("reward"),
        kl=row.get("kl"),
        advantage=row.get("advantage"),
        rewards=dict(_below(row, REWARDS)),
        extras=dict(_below(row, EXTRA)),
    )


def _below(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((name.removeprefix(prefix), value) for name, value in row.items() if name.startswith(prefix))


def _prompt(text: str | None) -> PromptContent | None:
    """The prompt as the data set held it; text that is no JSON stands for itself."""
    if text is None:
        return None
    try:
        prompt = json.loads(text)
    except ValueError:
        return text
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    return prompt if is_messages or isinstance(prompt, str) else text


def _check_schema(path: Path, schema: pa.Schema) -> None:
    missing = [name for name in NEEDED if name not in schema.names]
    if missing:
        raise RefusedError(
            f"{path} is a parquet file, but holds no rollouts: it has no column `{missing[0]}` (columns: {', '.join(schema.names[:8])})."
        )
    for name, kind in zip(schema.names, schema.types, strict=True):
        expected = "double" if name.startswith(REWARDS) else COLUMNS.get(name, ("any", ""))[0]
        if not _fits(kind, expected):
            raise RefusedError(f"{path} is a parquet file, but holds no rollouts of ours: its column `{name}` is {kind}, not {expected}.")


def _fits(kind: pa.DataType, expected: str) -> bool:
    import pyarrow.types as types

    tests = {
        "int64": types.is_integer,
        "double": types.is_floating,
        "string": lambda kind: types.is_string(kind) or types.is_large_string(kind),
        "list<int32>": lambda kind: types.is_list(kind) and types.is_integer(kind.value_type),
        "list<float>": lambda kind: types.is_list(kind) and types.is_floating(kind.value_type),
        "list<image>": lambda kind: types.is_list(kind) and types.is_struct(kind.value_type),
        "any": lambda kind: True,
    }
    return types.is_null(kind) or bool(tests[expected](kind))
