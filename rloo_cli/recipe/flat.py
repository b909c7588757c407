"""A recipe as a flat table of values by dotted path, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rloo_cli.recipe.schema import Recipe


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Every field by its dotted path, in the order of the schema; rewards by index, `rewards[0].weight`. Values are plain data."""
    flat: dict[str, Any] = {}
    for section, values in recipe.model_dump(mode="json").items():
        entries = [(f"{section}[{i}]", entry) for i, entry in enumerate(values)] if section == "rewards" else [(section, values)]
        for prefix, entry in entries:
            flat |= {f"{prefix}.{name}": value for name, value in entry.items()}
    return flat


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed, each by its path of `flat_values`."""
    document = recipe.model_dump(mode="json")
    for field, value in values.items():
        section, _, name = field.rpartition(".")
        target = document["rewards"][int(section[8:-1])] if section.startswith("rewards[") else document[section]
        target[name] = value
    return Recipe.model_validate_json(json.dumps(document))
