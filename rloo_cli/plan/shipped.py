"""The recipes that come with rloo."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import rloo_cli
from rloo_cli.recipe.nodes import printable

PACKAGE = Path(rloo_cli.__file__).resolve().parent


def shipped_folder() -> Path:
    """The folder of shipped recipes: inside an installed package, or beside the package in a clone."""
    inside = PACKAGE / "_recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by the names that `rloo train` takes."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def shipped_templates() -> dict[str, Path]:
    """The shipped folders to begin from, by name."""
    return {path.parent.name: path.parent for path in sorted(shipped_folder().glob("*/recipe.yaml"))}


def find_recipe(name: str | Path) -> Path:
    """The file that `rloo train NAME` means: a path, or where there is none, the shipped recipe of that name."""
    path = Path(name)
    if not path.exists() and path.name == str(name):
        shipped = shipped_folder() / f"{path.name.removesuffix('.yaml')}.yaml"
        if shipped.is_file():
            return shipped
    return path


def why_missing(name: str | Path) -> str:
    """What to say of a plain name (`template`, `quickstar`) that is neither a file here nor a shipped recipe; empty for anything else."""
    path, folder = Path(name), shipped_folder()
    if path.exists() or path.name != str(name) or path.suffix:
        return ""
    if (folder / path / "recipe.yaml").is_file():
        return f"{name} is a folder to begin from: `rloo recipes cp {name} my-task`, change what is in it, then name my-task/recipe.yaml."
    names = list(shipped_recipes())
    near = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return f"{printable(str(name))}: no such file, and no shipped recipe of that name; there are {', '.join(names)}.{hint}"
