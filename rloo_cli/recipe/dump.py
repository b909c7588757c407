"""A recipe as YAML text, every default written out; `load_recipe` reads it back to the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from rloo_cli.recipe.scalars import reads_as_text
from rloo_cli.recipe.schema import Recipe


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with quotes wherever a bare text would be read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """True: a list that stands twice is written twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if _fits_block(text) else '"')
    style = None if reads_as_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style if text.isprintable() else '"')


def _fits_block(text: str) -> bool:
    """Whether a literal block keeps the text: no trailing spaces, tabs or foreign line breaks, no leading blank."""
    lines = text.split("\n")
    return all(line.isprintable() and line == line.rstrip() for line in lines) and text[0] not in " \n"


_Dumper.add_representer(str, _represent_text)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, in the order of the schema; loads again to an equal Recipe."""
    return dump_document(recipe.model_dump(mode="json"))


def dump_document(document: Mapping[str, Any]) -> str:
    """A mapping of plain data as the YAML of a recipe, in its own order; reading it gives the same values."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
