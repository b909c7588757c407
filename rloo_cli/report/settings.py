"""The recipe as a difference from its defaults, and the environment, as rows of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.inspect.recipe_values import ABSENT as NO_FIELD
from rloo_cli.inspect.recipe_values import changed_values, default_values, shown_value
from rloo_cli.recipe.reward_rules import reward_name
from rloo_cli.recipe.schema import Recipe
from rloo_cli.report.run_view import RunView

ABSENT = "—"
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row: a name, its value in each run, what it would be by default."""

    name: str
    values: tuple[str, ...]
    default: str = ""

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1


def recipe_settings(views: Sequence[RunView]) -> list[Setting]:
    """Every field that has another value than its default in one of the runs, or that has none."""
    tables = [_changed(view.recipe) if view.recipe is not None else {} for view in views]
    names = list(dict.fromkeys(name for table in tables for name in table))
    return _differing_first([_setting(name, views, tables) for name in sorted(names, key=_schema_order)])


def environment_settings(views: Sequence[RunView]) -> list[Setting]:
    """What the runs ran on."""
    tables = [_environment(view.environment) for view in views]
    names = list(dict.fromkeys(name for table in tables for name in table))
    return _differing_first([Setting(name=name, values=tuple(table.get(name, ABSENT) for table in tables)) for name in names])


def _differing_first(settings: Sequence[Setting]) -> list[Setting]:
    return sorted(settings, key=lambda setting: not setting.differs)


def _setting(name: str, views: Sequence[RunView], tables: Sequence[Mapping[str, tuple[str, str]]]) -> Setting:
    default = next(table[name][1] for table in tables if name in table)
    missing = [default if view.recipe is not None else ABSENT for view in views]
    values = tuple(table[name][0] if name in table else other for table, other in zip(tables, missing, strict=True))
    return Setting(name=name, values=values, default=default)


def _changed(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Field → (value, default). Rewards are told by name, so that their order does not matter."""
    defaults = default_values(recipe)
    return {
        _by_name(field, recipe): (shown_value(value), shown_value(defaults.get(field, NO_FIELD)))
        for field, value in changed_values(recipe).items()
    }


def _by_name(field: str, recipe: Recipe) -> str:
    match = re.fullmatch(r"rewards\[(\d+)\]\.(.*)", field)
    return f"rewards[{reward_name(recipe.rewards[int(match[1])])}].{match[2]}" if match is not None else field


def _schema_order(name: str) -> int:
    section = name.partition(".")[0].partition("[")[0]
    return list(Recipe.model_fields).index(section)


def _environment(document: Mapping[str, Any]) -> dict[str, str]:
    git, packages, command, gpus = (document.get(key) for key in ("git", "packages", "command", "gpus"))
    memory = document.get("memory_bytes")
    rows = {
        "started": document.get("time"),
        "command": " ".join(map(str, command)) if isinstance(command, list) else None,
        "host": document.get("host"),
        "platform": document.get("platform"),
        "processor": _processor(document),
        "memory": f"{memory / GIB:.0f} GiB" if isinstance(memory, int | float) else None,
        "GPUs": "; ".join(map(str, gpus)) or "none" if isinstance(gpus, list) else None,
        "processes": document.get("num_processes"),
        "git": f"{git.get('commit')}{', with changes' if git.get('changed') else ''}" if isinstance(git, dict) else None,
        "python": document.get("python"),
    }
    found = {name: str(value) for name, value in rows.items() if value is not None} if document else {}
    return found | ({str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {})


def _processor(document: Mapping[str, Any]) -> str | None:
    name, cores = document.get("cpu"), document.get("cores")
    return f"{name}, {cores} cores usable" if name and cores else name
