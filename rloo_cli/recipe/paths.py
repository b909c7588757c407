"""Path-like fields: `${VAR}`, `~`, and whether a name is a file here or an id on the hub."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rloo_cli.recipe.accelerate_keys import STRATEGIES

PATH_FIELDS: Mapping[str, str] = {
    "model_name_or_path": "folder",
    "chat_template_path": "file",
    "dataset_name": "any",
    "output_dir": "output",
    "vllm_server_key_file": "later",
    "vllm_weight_transfer_dir": "output",
    "accelerate_config": "strategy",
}
"""Leaf → what it may name (output: it need not exist yet; later: nor this, and what exists is found as any file is; strategy: as later, or one
of our configurations); `${VAR}` is replaced in these alone."""
REWARD_PATH_FIELDS: Mapping[str, str] = {"model": "folder"}
"""The same for the fields of an entry of `rewards`."""

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HUB_ID = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?", re.ASCII)
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".yaml", ".yml", ".gguf", ".safetensors")


def expand_variables(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The text with `${VAR}` and a leading `~` replaced, and what is wrong with it, or an empty string."""
    if "\0" in text:
        return text, "a path holds no NUL characters."
    faults: list[str] = []

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if not _VARIABLE_NAME.fullmatch(name):
            faults.append(f"`{match[0][:60]}` is no environment variable; write ${{NAME}}.")
        elif not environ.get(name):
            faults.append(f"the environment variable {name[:60]} is not set.")
        return environ.get(name, "")

    expanded = _VARIABLE.sub(value_of, text)
    if not faults and "${" in expanded:
        faults.append("`${` has no closing brace, or stands in a variable's value.")
    if faults:
        return text, faults[0]
    home = environ.get("HOME")
    if home and (expanded == "~" or expanded.startswith("~/")):
        expanded = home + expanded[1:]
    return expanded, ""


def resolve(text: str, kind: str, folders: Sequence[Path]) -> tuple[str, str]:
    """The absolute path of what `text` names below the first folder that has it, else the hub id itself; and a fault, or ''.

    `kind` is a value of PATH_FIELDS. A text that looks like a path, or cannot be a hub id, is a fault where nothing exists.
    """
    if not text.strip():
        return text, "an empty path."
    if kind == "output" or (kind == "strategy" and text in STRATEGIES):
        return text, ""
    for folder in folders:
        candidate = Path(os.path.normpath((folder / text).absolute()))
        found = _kind_of(candidate)
        if found and kind in ("folder", "file") and found != kind:
            return text, f"{candidate} is a {found}, where a {kind} is needed."
        if found:
            return str(candidate), ""
    if kind in ("later", "strategy"):
        return text, ""
    if kind != "file" and _HUB_ID.fullmatch(text) and not text.lower().endswith(_FILE_SUFFIXES):
        return text, ""
    if Path(text).is_absolute():
        return text, "no such file or folder."
    looked = " nor ".join(dict.fromkeys(f"`{folder}`" for folder in folders))
    hub = "" if kind == "file" else "; a hub id is NAME or OWNER/NAME"
    return text, f"no such file or folder in {looked}{hub}."


def _kind_of(path: Path) -> str:
    """`file`, `folder`, or an empty string where there is nothing that can be looked at."""
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else ""
    except (OSError, ValueError):  # a name that is too long, a folder that may not be entered
        return ""
