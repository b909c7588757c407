"""Rollout files: every completion of a step with its rewards and advantage, as parquet that datasets and pandas read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.run import atomic
from rloo_cli.types import EncodedImage, FinishReason, PromptContent

COLUMNS = {
    "step": ("int64", "Optimizer step that the completion was made for."),
    "prompt_row": ("int64", "Row of the prompt in its split, from 0."),
    "prompt": ("string", "The prompt as JSON: a string or a list of messages."),
    "prompt_text": ("string", "The prompt as the model saw it; before an image's placeholder is repeated."),
    "images": (
        "list<image>",
        "The prompt's images, `bytes` and `path` of each, in the first row of its group; the column is there where a prompt has images.",
    ),
    "completion": ("string", "The completion, special tokens left out: what reward functions saw."),
    "completion_ids": ("list<int32>", "Its token ids, EOS included."),
    "logprobs": ("list<float>", "Log-prob of each token when it was sampled, nats."),
    "finish_reason": ("string", "stopped, stop_string, truncated or aborted."),
    "weights_version": ("int64", "Optimizer step of the weights that made it."),
    "reward": ("double", "Weighted sum of its rewards, before clipping and the KL penalty; null = unscored."),
    "kl": ("double", "KL estimate to the reference summed over the completion, nats; null = not computed."),
    "advantage": ("double", "Leave-one-out advantage; null in evaluations, and in groups that dynamic_sampling left out."),
    "rewards/<name>": ("double", "One reward function's value; null = does not apply."),
    "extra/<column>": ("any", "A value that a reward function gave to log_extra; as JSON where a column mixes types."),
}
"""The columns of a rollout file, a row a completion: arrow type and meaning."""

DEEPEST_NESTING = 8
"""Lists and objects within each other; deeper values of log_extra are stored as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One completion and all that is known about it; COLUMNS tells what each field means.

    In batches kept in failed/, a row that was not sampled to its end has no completion.
    """

    step: int
    prompt_row: int
    prompt: PromptContent
    prompt_text: str
    completion: str | None
    completion_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    finish_reason: FinishReason | None
    weights_version: int
    reward: float | None = None
    kl: float | None = None
    advantage: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By name of the reward function; the same names in every row."""
    images: Sequence[EncodedImage] = ()
    """In the first row of a group alone."""
    extras: Mapping[str, Any] = field(default_factory=dict)


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write a rollout file, whole, in place of one that an abandoned step may have left.

    Raises:
        StorageError: it could not be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array(values, type=kind) for name, kind, values in _fixed_columns(rows)}
    if any(row.images for row in rows):
        columns["images"] = _images(rows)
    for name in _names(row.rewards for row in rows):
        columns[f"rewards/{name}"] = pa.array([row.rewards.get(name) for row in rows], type=pa.float64())
    for name in _names(row.extras for row in rows):
        columns[f"extra/{name}"] = _any_array([row.extras.get(name) for row in rows])
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
        writer.write_table(table)
    atomic.write_file(path, sink.getvalue().to_pybytes())


def _fixed_columns(rows: Sequence[RolloutRow]) -> list[tuple[str, Any, list[Any]]]:
    import pyarrow as pa

    kinds = {
        "int64": pa.int64(),
        "string": pa.string(),
        "double": pa.float64(),
        "list<int32>": pa.list_(pa.int32()),
        "list<float>": pa.list_(pa.float32()),
    }
    return [
        (name, kinds[kind], [_cell(row, name) for row in rows]) for name, (kind, _) in COLUMNS.items() if kind in kinds and "<" not in name
    ]


def _images(rows: Sequence[RolloutRow]) -> Any:
    """As `datasets` stores a list of its Image feature."""
    import pyarrow as pa

    cells = [[{"bytes": image.data, "path": image.name or None} for image in row.images] if row.images else None for row in rows]
    return pa.array(cells, type=pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))


def _cell(row: RolloutRow, name: str) -> Any:
    value = getattr(row, name)
    if name == "prompt":
        return json.dumps(value if isinstance(value, str) else [dict(message) for message in value], default=str)
    return storable_text(value) if isinstance(value, str) else value


def storable_text(text: str) -> str:
    r"""The text with lone surrogates spelled out (`\ud800`): UTF-8 cannot hold them, and data sets may bring them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _names(mappings: Any) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _any_array(values: list[Any]) -> Any:
    """An array of the values' own type; JSON strings where they have none in common, or one that parquet does not hold."""
    import pyarrow as pa

    try:
        array = pa.array([storable_text(value) if isinstance(value, str) else value for value in values])
        if _is_storable(array.type, DEEPEST_NESTING):
            return array
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        pass
    return pa.array([None if value is None else storable_text(json.dumps(value, default=repr)) for value in values], type=pa.string())


def _is_storable(kind: Any, levels: int) -> bool:
    """Whether parquet holds an arrow type: it has no objects without fields, and readers give up on deep nesting."""
    if kind.num_fields == 0:
        return str(kind) != "struct<>"
    return levels > 0 and all(_is_storable(kind.field(i).type, levels - 1) for i in range(kind.num_fields))
