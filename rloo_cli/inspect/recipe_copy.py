"""A shipped recipe copied to where it can be changed: paths in it made absolute, the reward functions of its own copied along."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.recipe.fields import SECTIONS
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.nodes import Fields, Items, Pair, Problems, Scalar
from rloo_cli.recipe.paths import PATH_FIELDS, REWARD_PATH_FIELDS
from rloo_cli.recipe.yaml_source import parse
from rloo_cli.rewards.resolve import find_reward
from rloo_cli.run import atomic

SCHEMA_MARK = "$schema="


def copy_recipe(source: Path, target: Path) -> list[Path]:
    """Copy a recipe's file to `target`, and beside it the Python files of its reward functions; the paths of all that was written.

    The copy means the same: what it names by relative paths stays where it is, and is named by absolute ones. Comments are kept.

    Raises:
        RefusedError: something of the name exists already; nothing was written.
        StorageError: it could not be written.
    """
    files = {target: _moved_text(source, target)}
    for code in _reward_files(source):
        files[target.parent / code.relative_to(source.parent)] = code.read_text(encoding="utf-8")
    return _write(files)


def copy_folder(source: Path, target: Path) -> list[Path]:
    """Copy a folder to begin from, file by file; the paths of all that was written. Raises as `copy_recipe`."""
    if target.exists():
        raise _exists(target)
    files = {}
    for path in sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        text = path.read_text(encoding="utf-8")
        files[target / path.relative_to(source)] = _with_schema(text, path) if path.suffix == ".yaml" else text
    return _write(files)


def _write(files: dict[Path, str]) -> list[Path]:
    for path in files:
        if path.exists() or path.is_symlink():
            raise _exists(path)
    for path, text in files.items():
        atomic.make_folder(path.parent)
        atomic.write_file(path, text)
    return list(files)


def _exists(path: Path) -> RefusedError:
    return RefusedError(f"{path} exists already, and nothing is ever overwritten: choose another name, or move it away.")


def _moved_text(source: Path, target: Path) -> str:
    """The recipe's text with absolute paths, and with the copy's name where a comment gives a command."""
    text = source.read_text(encoding="utf-8")
    lines = _with_schema(text, source).split("\n")
    for scalar, path in sorted(_relative_paths(text, source), key=lambda found: (-found[0].place.line, -found[0].place.column)):
        line, start = lines[scalar.place.line - 1], scalar.place.column - 1
        end = start + len(scalar.text) + (0 if scalar.is_plain else 2)
        lines[scalar.place.line - 1] = line[:start] + str(path) + line[end:]
    named = f"recipes/{source.name}"
    return "\n".join(line.replace(named, str(target)) if line.lstrip().startswith("#") else line for line in lines)


def _with_schema(text: str, source: Path) -> str:
    """The text whose first line names the schema by an absolute path, for editors."""
    first, newline, rest = text.partition("\n")
    head, mark, name = first.partition(SCHEMA_MARK)
    if not mark or not head.startswith("#"):
        return text
    return f"{head}{mark}{os.path.normpath(source.parent.absolute() / name.strip())}{newline}{rest}"


def _relative_paths(text: str, source: Path) -> Iterator[tuple[Scalar, Path]]:
    """Each value that names something beside the recipe by a relative path, with the absolute one."""
    tree = parse(text, str(source), Problems())
    for name, pair in _leaves(tree) if isinstance(tree, Fields) else ():
        if (name not in (*PATH_FIELDS, *REWARD_PATH_FIELDS) and name != "extends") or not isinstance(pair.node, Scalar):
            continue
        path = Path(os.path.normpath(source.parent.absolute() / pair.node.text))
        if path.exists() and not Path(pair.node.text).is_absolute():
            yield pair.node, path


def _leaves(tree: Fields) -> Iterator[tuple[str, Pair]]:
    """Every field by its name; those of the entries of rewards and of a mixture too, a set's `path` as `dataset_name`."""
    for name, pair in tree.pairs.items():
        if name in SECTIONS and isinstance(pair.node, Fields):
            yield from _leaves(pair.node)
        elif name in ("rewards", "datasets") and isinstance(pair.node, Items):
            fields = [item.pairs for item in pair.node.items if isinstance(item, Fields)]
            for key, inner in (found for pairs in fields for found in pairs.items()):
                yield ("dataset_name" if (name, key) == ("datasets", "path") else key), inner
        else:
            yield name, pair


def _reward_files(source: Path) -> list[Path]:
    """The Python files below the recipe's folder that its reward functions stand in."""
    folder = source.parent.resolve()
    found = []
    for entry in load_recipe(source).recipe.rewards:
        if entry.function is None:
            continue
        try:
            file = Path(find_reward(entry.function, code_dir=folder).file).resolve()
        except RecipeError:
            continue  # what it lacks is said when the copy is run
        if file.is_relative_to(folder):
            found.append(source.parent / file.relative_to(folder))
    return list(dict.fromkeys(found))
