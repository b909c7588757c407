"""What was read of a script, written as a recipe with its module of reward functions beside it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.recipe.dump import dump_document
from rloo_cli.recipe.fields import LEAVES, SECTIONS
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run import atomic
from rloo_cli.trl_import.differences import default_lines, kept_defaults, meaning_lines
from rloo_cli.trl_import.read import Found, read_script

WIDTH = 120
REQUIRED = {"model_name_or_path": "some/model", "dataset_name": "some/data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import gives."""

    recipe: Path
    module: Path | None
    """The reward functions that were copied."""
    unread: tuple[str, ...]
    """A line for each thing that was not carried over, with its place in the script."""
    different: tuple[str, ...]
    """A line for each difference in meaning."""
    missing: tuple[str, ...]
    """What the recipe needs before it is one: its errors, as `rloo plan` has them."""


def import_script(script: Path, target: Path | None) -> Imported:
    """Write the recipe of a script; `target` None = beside the script, by its name.

    Raises:
        RecipeError: the script cannot be read.
        RefusedError: it trains nothing that a recipe could be, or something stands where a file would go.
    """
    recipe = target if target is not None else script.with_suffix(".yaml")
    module_name = f"{_identifier(recipe.stem)}_rewards"
    module = recipe.parent / f"{module_name}.py"
    found = read_script(script, module_name=module_name)
    files = {recipe: "", **({module: found.module} if found.module else {})}
    for file in files:
        if file.exists() or file.is_symlink():
            raise RefusedError(f"{file} exists already, and nothing is ever overwritten: name another by -o, or move it away.")
    kept = kept_defaults(found.fields)
    different = [*default_lines(found.fields), *meaning_lines(found.fields)]
    unread = [f"{script}:{line}: {text}" for line, text in found.notes]
    atomic.make_folder(recipe.parent)
    if found.module:
        atomic.write_file(module, f'"""Reward functions of {script.name}, copied by `rloo import-trl`."""\n\n{found.module}')
    atomic.write_file(recipe, _text(found, kept, script, unread, different))
    return Imported(
        recipe=recipe,
        module=module if found.module else None,
        unread=tuple(unread),
        different=tuple(different),
        missing=_missing(recipe),
    )


def _identifier(name: str) -> str:
    """A name that a module can have."""
    text = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() else text or "recipe"


def _text(found: Found, kept: dict[str, Any], script: Path, unread: list[str], different: list[str]) -> str:
    parts = [_comment(f"Written by `rloo import-trl {script.name}`.")]
    if unread:
        parts.append(_comment("Not carried over, by the script's lines:", *unread))
    parts.append(_comment("Not as in TRL:", *different))
    fields = {**found.fields, **kept}
    said = {name: f"line {line}" for name, line in found.lines.items()} | dict.fromkeys(kept, "TRL's default")
    for section in SECTIONS:
        own = {name: fields[name] for name in SECTIONS[section].model_fields if name in fields}
        lines = [line for name, value in own.items() for line in _field_lines(name, value, said[name])]
        lines += [f"  # {name}: {REQUIRED[name]}   # needed" for name in REQUIRED if LEAVES[name].section == section and name not in fields]
        if lines:
            parts.append("\n".join([f"{section}:", *lines]))
        if section == "data":
            parts.append(_rewards_text(found.rewards.entries))
    return "\n\n".join(parts) + "\n"


def _field_lines(name: str, value: Any, remark: str) -> list[str]:
    lines = textwrap.indent(dump_document({name: value}), "  ").rstrip("\n").split("\n")
    return [f"{lines[0]}   # {remark}", *lines[1:]] if len(lines) == 1 else [f"  # {remark}", *lines]


def _rewards_text(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "rewards: []   # needed: at least one `- function: …`"
    return dump_document({"rewards": entries}).rstrip("\n")


def _comment(title: str, *lines: str) -> str:
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, initial_indent="#   - ", subsequent_indent="#     ")]
    return "\n".join([f"# {title}", *wrapped])


def _missing(recipe: Path) -> tuple[str, ...]:
    try:
        load_recipe(recipe)
    except RecipeError as error:
        return tuple(error.message.splitlines())
    return ()
