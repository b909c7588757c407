"""The JSON Schema of a recipe file, as editors (yaml-language-server) take it: draft 7, a description for every key."""

from __future__ import annotations

from typing import Any

from rloo_cli.recipe.fields import LEAVES, SECTIONS
from rloo_cli.recipe.schema import Recipe, RewardEntry
from rloo_cli.recipe.trl_keys import RENAMED, TRL_KEYS, Treatment

SCHEMA_ID = "http://json-schema.org/draft-07/schema#"

_EXTRA_KEYS: dict[str, dict[str, Any]] = {
    "extends": {"type": "string", "description": "Another recipe, relative to this file; what stands here wins, lists replace."},
    "reward_funcs": {
        "type": ["array", "string"],
        "items": {"type": "string"},
        "description": "Reward functions by name (a name without a dot is a built-in), and reward models by hub id or folder: the short way to write `rewards`.",
    },
    "reward_model_name_or_path": {
        "type": ["string", "null"],
        "description": "A reward model by hub id or folder: TRL's way to write an entry `- model:`, the first of `rewards`.",
    },
    "reward_weights": {
        "type": ["array", "null"],
        "items": {"type": "number"},
        "description": "The weight of each of `reward_funcs`; left out = 1.0 each.",
    },
}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file: sections, flat keys, `extends`, `reward_funcs`, and TRL's keys marked as deprecated.

    Nothing is required, since a recipe may extend another one; `rloo plan` knows what is missing.
    """
    raw = _rewritten(Recipe.model_json_schema())
    definitions = raw["definitions"]
    for model in SECTIONS.values():
        definitions[model.__name__].pop("required", None)
    definitions[RewardEntry.__name__]["anyOf"] = [{"required": ["function"]}, {"required": ["model"]}]
    sections = {name: _section(name, raw["properties"][name], definitions) for name in Recipe.model_fields}
    flat = {name: definitions[SECTIONS[leaf.section].__name__]["properties"][name] for name, leaf in LEAVES.items()}
    return {
        "$schema": SCHEMA_ID,
        "title": "rloo recipe",
        "description": "A recipe for `rloo train`: sections, or the same keys flat at the top level.",
        "type": "object",
        "additionalProperties": False,
        "properties": sections | flat | _EXTRA_KEYS | _trl_keys(),
        "definitions": definitions,
    }


def _section(name: str, raw: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if name == "rewards":
        return raw
    return {"$ref": f"#/definitions/{SECTIONS[name].__name__}", "description": definitions[SECTIONS[name].__name__].get("description", "")}


def _trl_keys() -> dict[str, dict[str, Any]]:
    keys = {}
    for name, key in TRL_KEYS.items():
        if key.treatment is not Treatment.HONOURED:
            because = f": {key.because}" if key.because else ""
            keys[name] = {"deprecated": True, "description": f"TRL's key, {_WORDS[key.treatment]}{because}."}
    for name, today in RENAMED.items():
        keys[name] = {"deprecated": True, "description": f"An older name of `{today}`."}
    return keys


_WORDS = {
    Treatment.SAME: "accepted with the value that is so by construction",
    Treatment.NO_EFFECT: "accepted without effect",
    Treatment.REFUSED: "refused unless it has TRL's default",
    Treatment.LATER: "not in this version, accepted with TRL's default",
}


def _rewritten(node: Any) -> Any:
    """The schema of pydantic (draft 2020-12) in the words of draft 7, without the titles that it makes up."""
    if isinstance(node, list):
        return [_rewritten(item) for item in node]
    if not isinstance(node, dict):
        return node
    renamed = {("definitions" if key == "$defs" else key): _rewritten(value) for key, value in node.items() if not _is_title(key, value)}
    if "prefixItems" in renamed:
        renamed["items"] = renamed.pop("prefixItems")[0]
    if isinstance(renamed.get("$ref"), str):
        renamed["$ref"] = renamed["$ref"].replace("#/$defs/", "#/definitions/")
    return renamed


def _is_title(key: str, value: Any) -> bool:
    return key == "title" and isinstance(value, str)
