"""A script's data set: from `load_dataset(…)` and what is done to it, to fields of a recipe."""

from __future__ import annotations

import ast
import re
from typing import Any

from rloo_cli.trl_import.scope import Unread
from rloo_cli.trl_import.values import Values, text_of

FORMATS = ("json", "csv", "parquet")
"""Names of `datasets` for files, which stand in `data_files`."""
HARMLESS = ("shuffle", "remove_columns", "select_columns", "with_format", "set_format", "flatten_indices", "cast_column")
"""Methods that change no prompt: the order is the recipe's, and columns that nobody reads cost nothing."""
SLICE = re.compile(r"(\w+)\[:(\d+)\]")
SPLIT = "dataset_train_split"
MOST = "max_train_samples"


def data_fields(node: ast.expr, values: Values) -> dict[str, Any]:
    """`dataset_name`, `dataset_train_split` and what else the expression comes to.

    Raises:
        Unread: a step of it cannot be carried over.
    """
    if isinstance(node, ast.Name):
        return data_fields(values.script.value_of(node), values)
    if isinstance(node, ast.Subscript):
        return data_fields(node.value, values) | {SPLIT: str(values.value(node.slice))}
    if not isinstance(node, ast.Call):
        raise Unread(node, f"`{text_of(node)}` is no data set that a recipe can name")
    name = values.script.dotted(node.func)
    if name.split(".")[-1] in ("load_dataset", "load_from_disk"):
        return _loaded(node, values)
    made = values.script.functions.get(name)
    if isinstance(made, ast.FunctionDef) and (returned := _returned(made)) is not None:
        if node.args or node.keywords:
            values.notes.append((node.lineno, f"the arguments of `{text_of(node)}` are not followed; its defaults are"))
        return data_fields(returned, values)
    if isinstance(node.func, ast.Attribute) and not name.startswith("datasets."):
        return _changed(node, node.func, values)
    raise Unread(
        node, f'`{text_of(node)}` makes its rows when the script runs: save them (`dataset.to_json("train.jsonl")`) and name the file'
    )


def _returned(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns, where one statement of it does."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return found[0].value if len(found) == 1 else None


def _loaded(call: ast.Call, values: Values) -> dict[str, Any]:
    keywords = values.keywords(call)
    positional = [values.value(argument) for argument in call.args]
    first = positional[0] if positional else values.value(keywords["path"]) if "path" in keywords else None
    fields: dict[str, Any] = {"dataset_name": first}
    if first in FORMATS and "data_files" in keywords:
        files = values.value(keywords["data_files"])
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        if not isinstance(files, str):
            raise Unread(call, "several data files: put them into one folder, a file for each split, and name that")
        fields["dataset_name"] = files
    config = positional[1] if len(positional) > 1 else values.value(keywords["name"]) if "name" in keywords else None
    if config is not None:
        fields["dataset_config"] = config
    if "split" in keywords:
        fields |= _split(call, str(values.value(keywords["split"])))
    for name in keywords.keys() - {"path", "name", "split", "data_files", "trust_remote_code", "num_proc"}:
        if name == "streaming":
            fields["dataset_streaming"] = values.value(keywords[name])
        else:
            values.notes.append((call.lineno, f"`{name}=` of load_dataset is not carried over"))
    return fields


def _split(call: ast.Call, split: str) -> dict[str, Any]:
    if split.isidentifier():
        return {SPLIT: split}
    match = SLICE.fullmatch(split)
    if match is None:
        raise Unread(call, f"a split such as {split!r} cannot be named: a recipe takes the first n rows, `max_train_samples`")
    return {SPLIT: match[1], MOST: int(match[2])}


def _changed(call: ast.Call, method: ast.Attribute, values: Values) -> dict[str, Any]:
    fields, name = data_fields(method.value, values), method.attr
    if name in HARMLESS:
        return fields
    if name == "select" and len(call.args) == 1 and (count := _count(call.args[0], values)) is not None:
        if any(isinstance(part, ast.Attribute) and part.attr == "shuffle" for part in ast.walk(method.value)):
            values.notes.append((call.lineno, f"the first {count} rows are taken, not {count} of a shuffled order"))
        return fields | {MOST: min(count, fields.get(MOST, count))}
    if name == "rename_column" and len(call.args) == 2:
        old, new = (values.value(argument) for argument in call.args)
        if new == "prompt":
            return fields | {"prompt_column": old}
    values.notes.append(
        (
            call.lineno,
            f'`.{name}(…)` cannot be carried over: save what it gives (`dataset.to_json("train.jsonl")`) and name the file in `dataset_name`',
        )
    )
    return fields


def _count(node: ast.expr, values: Values) -> int | None:
    """n of `range(n)`."""
    if isinstance(node, ast.Call) and values.script.dotted(node.func) == "range" and len(node.args) == 1:
        count = values.value(node.args[0])
        return count if isinstance(count, int) else None
    return None
