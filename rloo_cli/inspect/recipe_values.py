"""The values of a recipe against the defaults, and two or more recipes held against each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.recipe.flat import flat_values
from rloo_cli.recipe.scalars import reads_as_text
from rloo_cli.recipe.schema import Recipe, RewardEntry

ABSENT = object()
"""Stands for a field that one of several recipes does not have: the second reward of a recipe with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field of which recipes say different things. Example: `Difference(field="algorithm.beta", values=(0.0, 0.05))`."""

    field: str
    values: tuple[Any, ...]
    """One for each recipe, in order; ABSENT where it has no such field."""


def default_values(recipe: Recipe) -> dict[str, Any]:
    """What each field of `flat_values` is where nobody says anything; required fields have no entry."""
    defaults: dict[str, Any] = {}
    for section in Recipe.model_fields:
        model = RewardEntry if section == "rewards" else type(getattr(recipe, section))
        own = {name: info.get_default(call_default_factory=True) for name, info in model.model_fields.items() if not info.is_required()}
        for prefix in [f"rewards[{i}]" for i in range(len(recipe.rewards))] if section == "rewards" else [section]:
            defaults |= {f"{prefix}.{name}": _plain(value) for name, value in own.items()}
    return defaults


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def differences(recipes: Sequence[Recipe]) -> list[Difference]:
    """The fields in which the recipes are not all the same, in the order of the schema."""
    flats = [flat_values(recipe) for recipe in recipes]
    names = list(dict.fromkeys(name for flat in sorted(flats, key=len, reverse=True) for name in flat))  # that with most rewards has all
    found = [Difference(field=name, values=tuple(flat.get(name, ABSENT) for flat in flats)) for name in names]
    return [each for each in found if any(value is ABSENT or value != each.values[0] for value in each.values)]


def changed_values(recipe: Recipe) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    defaults = default_values(recipe)
    return {name: value for name, value in flat_values(recipe).items() if name not in defaults or value != defaults[name]}


def shown_value(value: Any) -> str:
    """A value on one line, as YAML would read it back.

    >>> shown_value(0.05), shown_value("auto"), shown_value("1"), shown_value(None), shown_value(["a"])
    ('0.05', 'auto', '"1"', 'null', '["a"]')
    """
    if value is ABSENT:
        return "—"
    if isinstance(value, str) and value.isprintable() and value and reads_as_text(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def json_values(difference: Difference, names: Sequence[str]) -> Mapping[str, Any]:
    """A difference for machines: the field, and the values by name; what a recipe does not have is left out."""
    given = zip(names, difference.values, strict=True)
    return {"field": difference.field} | {name: value for name, value in given if value is not ABSENT}
