"""The recipes that come with rloo."""

from __future__ import annotations

from pathlib import Path

import rloo_cli

PACKAGE = Path(rloo_cli.__file__).resolve().parent


def shipped_folder() -> Path:
    """The folder of shipped recipes: inside an installed package, or beside the package in a clone."""
    inside = PACKAGE / "_recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def find_recipe(name: str | Path) -> Path:
    """The file that `rloo train NAME` means: a path, or where there is none, the shipped recipe of that name."""
    path = Path(name)
    if not path.exists() and path.name == str(name):
        shipped = shipped_folder() / f"{path.name.removesuffix('.yaml')}.yaml"
        if shipped.is_file():
            return shipped
    return path
