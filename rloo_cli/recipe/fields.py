"""The schema's leaves as a table, and how a written value becomes the value of a field.

pydantic holds names, types, bounds and defaults (`schema.py`); the fitting stands here because a text's meaning depends on the
field (`no`, `1e-6`), and because every message carries a place and a remedy.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Place, Scalar, printable
from rloo_cli.recipe.nodes import Problems as _Problems
from rloo_cli.recipe.scalars import FALSE_WORDS, TRUE_WORDS, is_null, number_in, plain_data
from rloo_cli.recipe.schema import Recipe, RewardEntry, Section
from rloo_cli.recipe.yaml_source import parse

Fail = Callable[[Place, str], None]
BROKEN: Any = object()
"""What `fit` returns where a problem was noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a field takes. Example: `max_prompt_length` is `Shape(base="whole", nullable=True, bounds=(("at least", 1),))`."""

    base: str
    """text, whole, number, flag, choice, list, pair or mapping."""
    nullable: bool = False
    words: tuple[str, ...] = ()
    """The words of a choice, or those that a number may be instead (`auto`)."""
    bounds: tuple[tuple[str, float], ...] = ()
    """(`at least` | `above` | `at most` | `below`, limit)."""
    item: Shape | None = None
    fields: Mapping[str, Leaf] = field(default_factory=dict)
    """Of an entry: what it may hold."""

    def expected(self) -> str:
        """In words, for messages: `a whole number, `auto` or null`."""
        words = [f"`{word}`" for word in self.words]
        if self.base == "choice":
            return f"one of {', '.join(words + ['null'] * self.nullable)}"
        kinds = {
            "text": "a text",
            "whole": "a whole number",
            "number": "a number",
            "flag": "true or false",
            "mapping": "a mapping",
            "entry": "a mapping",
        }
        base = kinds.get(self.base) or ("a list" if self.base == "list" else "two numbers [low, high]")
        alternatives = [base, *words, *(["null"] if self.nullable else [])]
        return " or ".join(filter(None, [", ".join(alternatives[:-1]), alternatives[-1]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One field of one section."""

    section: str
    name: str
    shape: Shape
    is_required: bool
    info: FieldInfo

    @property
    def path(self) -> str:
        """`section.name`."""
        return f"{self.section}.{self.name}"


_BASES: dict[Any, str] = {str: "text", int: "whole", float: "number", bool: "flag"}
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


def _bounds(metadata: Iterable[Any]) -> tuple[tuple[str, float], ...]:
    found: list[tuple[str, float]] = []
    for item in metadata:
        found += [(words, getattr(item, attribute)) for kind, attribute, words in _BOUNDS if isinstance(item, kind)]
        if isinstance(item, FieldInfo):
            found += _bounds(item.metadata)
    return tuple(found)


def shape_of(annotation: Any, bounds: tuple[tuple[str, float], ...] = ()) -> Shape:
    """The shape of a type annotation of the schema; TypeError for a kind of annotation that the schema does not use yet."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return shape_of(arguments[0], bounds + _bounds(annotation.__metadata__))
    if origin in (typing.Union, types.UnionType):
        return _shape_of_union(arguments, bounds)
    if origin is typing.Literal and all(isinstance(word, str) for word in arguments):
        return Shape(base="choice", words=tuple(arguments))
    if origin is list:
        return Shape(base="list", item=shape_of(arguments[0]))
    if origin is tuple:
        return Shape(base="pair", item=shape_of(arguments[0]))
    if origin is dict:
        return Shape(base="mapping")
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape(base="entry", fields=_leaves_of("", annotation))
    if annotation in _BASES:
        return Shape(base=_BASES[annotation], bounds=bounds)
    raise TypeError(f"no shape for {annotation!r}")


def _shape_of_union(arguments: tuple[Any, ...], bounds: tuple[tuple[str, float], ...]) -> Shape:
    shapes = [shape_of(argument, bounds) for argument in arguments if argument is not types.NoneType]
    main = next((shape for shape in shapes if shape.base != "choice"), shapes[0])
    words = tuple(word for shape in shapes for word in shape.words)
    nullable = types.NoneType in arguments or any(shape.nullable for shape in shapes)
    return Shape(base=main.base, nullable=nullable, words=words, bounds=main.bounds, item=main.item)


def _leaves_of(section: str, model: type[Section]) -> dict[str, Leaf]:
    return {
        name: Leaf(
            section=section, name=name, shape=shape_of(info.annotation, _bounds(info.metadata)), is_required=info.is_required(), info=info
        )
        for name, info in model.model_fields.items()
    }


SECTIONS: Mapping[str, type[Section]] = {
    name: typing.cast("type[Section]", info.annotation) for name, info in Recipe.model_fields.items() if name != "rewards"
}
LEAVES: Mapping[str, Leaf] = {name: leaf for section, model in SECTIONS.items() for name, leaf in _leaves_of(section, model).items()}
"""Leaf name → leaf, over all sections but `rewards`; leaf names are unique."""
REWARD_LEAVES: Mapping[str, Leaf] = _leaves_of("rewards", RewardEntry)

_REMEDIES: Mapping[tuple[str, str], str] = {
    ("num_generations", "bound"): "a lone completion has nothing to be compared with (leave-one-out)",
    ("temperature", "bound"): "training samples; for greedy evaluation there is `eval_temperature: 0`",
    ("top_k", "bound"): "0 turns it off",
    ("min_p", "bound"): "0 turns it off",
    ("top_p", "bound"): "1 turns it off",
    ("max_steps", "bound"): "-1 = as many as num_train_epochs needs",
    ("logging_steps", "kind"): "a share of all steps is not offered",
    ("save_steps", "kind"): "a share of all steps is not offered",
    ("eval_steps", "kind"): "a share of all steps is not offered",
    ("dynamic_sampling_max_batches", "bound"): "with 1 nothing would be drawn again, which is `dynamic_sampling: filter`",
    ("dtype", "kind"): "`auto` and float16 are not offered; float32 is the default and keeps master weights",
    ("attn_implementation", "kind"): "flash attention's own package is not used; sdpa runs torch's flash kernels where the device has them",
    ("report_to", "kind"): "name each tracker, or none",
}
"""What a message adds for a field, by the kind of fault."""


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that the author probably meant, or None."""
    matches = difflib.get_close_matches(word[:60].lower(), list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(node: Node) -> str:
    """A written value inside a message: `'fast'`, true, 3, a list."""
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Fields):
        return "a mapping"
    if isinstance(node, Broken):
        return "nothing"
    if is_null(node):
        return "null"
    if node.is_plain and (number_in(node.text) is not None or node.text in TRUE_WORDS | FALSE_WORDS):
        return printable(node.text)
    return f"'{printable(node.text)}'"


def fit(node: Node, leaf: Leaf, fail: Fail) -> Any:
    """The value of a field, or BROKEN after `fail(place, message)`."""
    if isinstance(node, Broken):
        return BROKEN
    if is_null(node) and leaf.shape.nullable:
        return None
    if isinstance(node, Scalar) and leaf.shape.base == "mapping":
        node = _json_text(node) or node
    return _FITTERS[leaf.shape.base](node, leaf, leaf.shape, fail)


def _json_text(node: Scalar) -> Node | None:
    """A mapping written as JSON inside a string, as commands lines write it; None where it is none."""
    if node.is_plain or not node.text.lstrip().startswith("{"):
        return None
    try:
        json.loads(node.text)
    except (ValueError, RecursionError):
        return None
    tree = parse(node.text, node.place.origin, _Problems(), positions=False)
    return tree if isinstance(tree, Fields) else None


def _wrong_kind(node: Node, leaf: Leaf, shape: Shape, fail: Fail, *, more: str = "") -> Any:
    remedy = more or _REMEDIES.get((leaf.name, "kind"), "")
    fail(node.place, f"expected {shape.expected()}, got {shown(node)}{f': {remedy}' if remedy else ''}.")
    return BROKEN


def _fit_text(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if not isinstance(node, Scalar) or is_null(node) or (node.is_plain and node.text.lower() in ("true", "false")):
        return _wrong_kind(node, leaf, shape, fail)
    return node.text


def _fit_flag(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if isinstance(node, Scalar) and node.is_plain and node.text in TRUE_WORDS | FALSE_WORDS:
        return node.text in TRUE_WORDS
    return _wrong_kind(node, leaf, shape, fail)


def _fit_choice(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if isinstance(node, Scalar) and node.text in shape.words:
        return node.text
    guess = closest(node.text, shape.words) if isinstance(node, Scalar) and not is_null(node) else None
    if guess:
        fail(node.place, f"expected {shape.expected()}, got {shown(node)}. Did you mean `{guess}`?")
        return BROKEN
    return _wrong_kind(node, leaf, shape, fail)


def _fit_number(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if not isinstance(node, Scalar):
        return _wrong_kind(node, leaf, shape, fail)
    if node.text in shape.words:
        return node.text
    number = number_in(node.text)
    if number is None or not node.is_plain:
        more = "remove the quotes" if isinstance(number, int | float) else ""
        return _wrong_kind(node, leaf, shape, fail, more=more)
    if isinstance(number, str):
        fail(node.place, f"expected {shape.expected()}: {number}.")
        return BROKEN
    if shape.base == "number":
        number = float(number)
    elif isinstance(number, float):
        if not number.is_integer() or abs(number) > 2**53:
            return _wrong_kind(node, leaf, shape, fail)
        number = int(number)
    return _within(number, node, leaf, shape, fail)


_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": lambda number, limit: number >= limit,
    "above": lambda number, limit: number > limit,
    "at most": lambda number, limit: number <= limit,
    "below": lambda number, limit: number < limit,
}


def _within(number: float, node: Scalar, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    broken = [f"{words} {limit}" for words, limit in shape.bounds if not _HOLDS[words](number, limit)]
    if not broken:
        return number
    wanted = " and ".join(f"{words} {limit}" for words, limit in shape.bounds)
    remedy = _REMEDIES.get((leaf.name, "bound"))
    fail(node.place, f"must be {wanted}, got {printable(node.text)}{f': {remedy}' if remedy else ''}.")
    return BROKEN


def _fit_list(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if not isinstance(node, Items):
        more = f"write [{printable(node.text)}]" if isinstance(node, Scalar) and not is_null(node) else ""
        return _wrong_kind(node, leaf, shape, fail, more=more)
    assert shape.item is not None
    values = [BROKEN if isinstance(item, Broken) else _FITTERS[shape.item.base](item, leaf, shape.item, fail) for item in node.items]
    return BROKEN if BROKEN in values else values


def _fit_pair(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if not isinstance(node, Items) or len(node.items) != 2:
        return _wrong_kind(node, leaf, shape, fail, more=f"it has {len(node.items)}" if isinstance(node, Items) else "")
    values = _fit_list(node, leaf, shape, fail)
    return BROKEN if values is BROKEN else tuple(values)


def _fit_mapping(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    if not isinstance(node, Fields):
        return _wrong_kind(node, leaf, shape, fail)
    failures: list[str] = []

    def fail_below(place: Place, message: str) -> None:
        failures.append(message)
        fail(place, message)

    value = plain_data(node, fail_below)
    return BROKEN if failures or _has_broken(node) else value


def _fit_entry(node: Node, leaf: Leaf, shape: Shape, fail: Fail) -> Any:
    """A mapping with fields of its own, as an entry of `datasets`; what is wrong is said with the field's name."""
    if not isinstance(node, Fields):
        return _wrong_kind(node, leaf, shape, fail)
    failures: list[str] = []

    def fail_at(name: str) -> Fail:
        def fail_field(place: Place, message: str) -> None:
            failures.append(message)
            fail(place, f"`{printable(name)}`: {message}")

        return fail_field

    values = {}
    for name, pair in node.pairs.items():
        if name not in shape.fields:
            guess = closest(name, shape.fields)
            fail_at(name)(pair.key_place, f"unknown field{_NO_ENTRY_FIELDS.get(name, '')}.{f' Did you mean `{guess}`?' if guess else ''}")
        elif not is_null(pair.node) or not shape.fields[name].shape.nullable:
            values[name] = fit(pair.node, shape.fields[name], fail_at(name))
    for name, field_ in shape.fields.items():
        if field_.is_required and name not in node.pairs:
            fail_at(name)(node.place, "required.")
    return BROKEN if failures or BROKEN in values.values() else values


_NO_ENTRY_FIELDS = dict.fromkeys(("data_dir", "data_files"), ": name the folder or the file itself as `path`")


def _has_broken(node: Node) -> bool:
    if isinstance(node, Items):
        return any(_has_broken(item) for item in node.items)
    if isinstance(node, Fields):
        return any(_has_broken(pair.node) for pair in node.pairs.values())
    return isinstance(node, Broken)


_FITTERS: Mapping[str, Callable[[Node, Leaf, Shape, Fail], Any]] = {
    "text": _fit_text,
    "whole": _fit_number,
    "number": _fit_number,
    "flag": _fit_flag,
    "choice": _fit_choice,
    "list": _fit_list,
    "pair": _fit_pair,
    "mapping": _fit_mapping,
    "entry": _fit_entry,
}
