"""`generation_kwargs` of TRL: options of transformers' GenerationConfig or of vLLM's SamplingParams, read as the fields that mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rloo_cli.recipe.fields import LEAVES, shown
from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Pair, Problems, Scalar, printable
from rloo_cli.recipe.scalars import is_null
from rloo_cli.recipe.settings import Entry, Settings
from rloo_cli.recipe.yaml_source import parse

KEY = "generation_kwargs"
SAME_AS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "stop": "stop",
    "stop_strings": "stop",
}
"""Option → field."""
ANYWAY: Mapping[str, str] = {"do_sample": "true", "num_beams": "1", "num_return_sequences": "1", "n": "1", "use_cache": "true"}
"""Options that say what is done in any case, with the value that says so."""
REGEX, REGEX_FIELD = "structured_outputs", "vllm_structured_outputs_regex"
OFFERED = ", ".join([*SAME_AS, "structured_outputs.regex"])


def gather_generation_kwargs(settings: Settings, problems: Problems) -> None:
    """Put each option into the field that means the same, in place; what no field means, and what a field says as well, is noted."""
    entry = settings.others.pop(KEY, None)
    if entry is None or is_null(entry.node) or isinstance(entry.node, Broken):
        return
    options = _mapping(entry.node)
    if options is None:
        problems.add(entry.node.place, KEY, f"expected a mapping of options, got {shown(entry.node)}.")
        return
    for name, pair in options.pairs.items():
        _put(name, pair, entry, settings, problems)


def _put(name: str, pair: Pair, entry: Entry, settings: Settings, problems: Problems) -> None:
    field, node = SAME_AS.get(name), pair.node
    if name == REGEX and isinstance(node, Fields) and list(node.pairs) == ["regex"]:
        field, node = REGEX_FIELD, node.pairs["regex"].node
    if isinstance(node, Broken) or (name in ANYWAY and isinstance(node, Scalar) and node.text.lower() == ANYWAY[name]):
        return
    if field is None:
        only = f"only {ANYWAY[name]} is offered" if name in ANYWAY else f"no field samples so; those that do are {OFFERED}"
        problems.add(pair.key_place, f"{KEY}.{printable(name)}", f"refused: {only}.")
    elif field in settings.leaves:
        place = settings.leaves[field].key_place
        where = f"line {place.line}" if place.line else str(place)
        problems.add(pair.key_place, f"{KEY}.{name}", f"given twice: here and as `{LEAVES[field].path}` on {where}. Keep one.")
    else:
        if field == "stop" and isinstance(node, Scalar) and not is_null(node):
            node = Items(node.place, (node,))
        settings.leaves[field] = Entry(pair.key_place, node, entry.folder, entry.is_flat)


def _mapping(node: Node) -> Fields | None:
    """The options, also where they are JSON in a string, as command lines write them."""
    if isinstance(node, Fields):
        return node
    if not isinstance(node, Scalar) or not node.text.lstrip().startswith("{"):
        return None
    try:
        json.loads(node.text)
    except (ValueError, RecursionError):
        return None
    tree = parse(node.text, node.place.origin, Problems(), positions=False)
    return tree if isinstance(tree, Fields) else None
