"""The reward functions that there are: built-in ones, and those of the modules in a folder. Read from source, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_cli import rewards
from rloo_cli.errors import RecipeError
from rloo_cli.rewards.resolve import OFFERED, RewardSource, find_reward

COMPLETIONS = "completions"
MOST_DEPTH = 3
"""Folders below `code_dir` that are looked into, as many as dotted paths of a sane length reach."""
SKIPPED = ("test_", "_", ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardName:
    """A reward function. Example: `RewardName(function="regex_reward", summary="1.0 where …", settings=("pattern", "match"), …)`."""

    function: str
    """As a recipe names it."""
    summary: str
    """The first line of its docstring."""
    settings: tuple[str, ...]
    """Its parameters beside what every call offers: columns of the data, or kwargs."""
    file: str
    line: int


def built_in_rewards() -> list[RewardName]:
    """Every reward function that rloo brings."""
    return [_named(find_reward(name, code_dir=Path())) for name in rewards.__all__]


def rewards_below(folder: Path) -> tuple[list[RewardName], list[str]]:
    """The functions with a parameter `completions` in the modules below a folder; and a line for each file that is no Python.

    Raises:
        RecipeError: there is no such folder.
    """
    if not folder.is_dir():
        raise RecipeError(f"--code-dir {folder}: no such folder")
    found, unreadable = [], []
    for path in _modules(folder, MOST_DEPTH):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        try:
            names = _functions(ast.parse(path.read_bytes(), str(path)))
            found += [_named(find_reward(f"{module}.{name}", code_dir=folder)) for name in names]
        except SyntaxError as error:
            unreadable.append(f"{path}:{error.lineno or 1}: {error.msg}")
        except (RecipeError, ValueError, OSError) as error:
            unreadable.append(f"{path}: {error}")
    return found, unreadable


def _modules(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(SKIPPED) or not entry.stem.isidentifier():
            continue
        if entry.is_dir() and depth > 1:
            yield from _modules(entry, depth - 1)
        elif entry.suffix == ".py":
            yield entry


def _functions(tree: ast.Module) -> list[str]:
    functions = [statement for statement in tree.body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function.name
        for function in functions
        if not function.name.startswith("_") and COMPLETIONS in {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    ]


def _named(source: RewardSource) -> RewardName:
    return RewardName(
        function=source.function,
        summary=summary_of(source),
        settings=tuple(name for name in source.parameters if name not in OFFERED),
        file=source.file,
        line=source.line,
    )


def summary_of(source: RewardSource) -> str:
    """The first line of the function's docstring; empty where it has none."""
    try:
        tree = ast.parse(Path(source.file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno == source.line:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
