"""The recipe's fields as rows of a table: what `rloo schema --show` prints and docs/recipes.md contains."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rloo_cli.recipe.schema import Recipe, RewardEntry, Section

SECTIONS: dict[str, type[Section]] = {
    name: RewardEntry if name == "rewards" else typing.cast("type[Section]", field.annotation)
    for name, field in Recipe.model_fields.items()
}
REQUIRED = "(required)"
"""Stands where a field has no default."""
BOUND_SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One field in words. Example: `FieldRow(name="beta", type="number ≥ 0", default="0.05", description="Weight of …")`."""

    name: str
    type: str
    default: str
    description: str


def section_fields(section: str) -> list[FieldRow]:
    """The fields of a section, in the order of the schema."""
    return [
        FieldRow(name=name, type=_type_words(field), default=_default_words(field), description=field.description or "")
        for name, field in SECTIONS[section].model_fields.items()
    ]


def _default_words(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    return plain_value(field.get_default(call_default_factory=True))


def plain_value(value: Any) -> str:
    """A value as YAML would show it on one line."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _type_words(field: FieldInfo) -> str:
    words = " or ".join(dict.fromkeys(_alternatives(field.annotation)))
    return _with_bounds(words, field.metadata)


def _with_bounds(words: str, metadata: typing.Iterable[Any]) -> str:
    for item in metadata:
        for kind, attribute, sign in BOUND_SIGNS:
            if isinstance(item, kind):
                words = f"{words} {sign} {getattr(item, attribute)}"
        nested = getattr(item, "metadata", None)
        if isinstance(nested, list | tuple):  # Field(ge=…) inside Annotated
            words = _with_bounds(words, nested)
    return words


def _alternatives(annotation: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield _with_bounds(" or ".join(_alternatives(arguments[0])), annotation.__metadata__)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _alternatives(argument)
    elif origin is typing.Literal:
        yield " | ".join(str(argument) for argument in arguments)
    elif origin is list:
        yield f"list of {' or '.join(_alternatives(arguments[0]))}"
    elif origin is tuple:
        yield f"[{', '.join(' or '.join(_alternatives(argument)) for argument in arguments)}]"
    elif origin is dict:
        yield "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield f"mappings ({', '.join(annotation.model_fields)})"
    else:
        yield {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}.get(annotation, str(annotation))
