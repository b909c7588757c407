"""What the shell completes: shipped recipes and recipe files, run folders. Nothing is read but names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

RUN_FILES = ("recipe.yaml", "metrics.jsonl")
MOST = 200
"""Names that are offered."""


def complete_shipped(incomplete: str) -> list[str]:
    """The shipped recipes and folders that begin so."""
    from rloo_cli.plan.shipped import shipped_recipes, shipped_templates

    return [name for name in (*shipped_recipes(), *shipped_templates()) if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """The shipped recipes and the YAML files that begin so."""
    from rloo_cli.plan.shipped import shipped_recipes

    return [
        *(name for name in shipped_recipes() if name.startswith(incomplete)),
        *_paths(incomplete, lambda path: path.suffix in (".yaml", ".yml")),
    ]


def complete_run(incomplete: str) -> list[str]:
    """The run folders that begin so; those below runs/ where nothing is typed yet."""
    return (not incomplete and _paths("runs/", _is_run)) or _paths(incomplete, _is_run)


def complete_recipe_or_run(incomplete: str) -> list[str]:
    """Both; what lies in a run is left out."""
    runs = complete_run(incomplete)
    inside = tuple(f"{run}/" for run in runs if not run.endswith("/"))
    return list(dict.fromkeys([*(name for name in complete_recipe(incomplete) if not name.startswith(inside)), *runs]))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def _paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> list[str]:
    """Paths that begin so and are wanted, and the folders on the way to them, which end with a slash.

    A lone folder comes with what is in it: shells put a space behind what is the only choice.
    """
    found = [path if wanted else f"{path}/" for path, wanted in _beginning(incomplete, is_wanted)][:MOST]
    alone = len(found) == 1 and found[0].endswith("/") and found[0] != incomplete
    return [*found, *_paths(found[0], is_wanted)] if alone else found


def _beginning(incomplete: str, is_wanted: Callable[[Path], bool]) -> Iterator[tuple[str, bool]]:
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head or slash or ".").expanduser()
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith(".")):
            wanted = is_wanted(entry)
            if wanted or entry.is_dir():
                yield f"{head}{slash}{entry.name}", wanted
