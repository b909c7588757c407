"""Layers over a recipe: the recipes that it `extends`, and `--set` from the command line."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from pathlib import Path

from rloo_cli.recipe.fields import LEAVES, SECTIONS, shown
from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Pair, Place, Problems, Scalar, printable
from rloo_cli.recipe.paths import expand_variables
from rloo_cli.recipe.scalars import is_null
from rloo_cli.recipe.settings import Entry, Settings, gather_rewards, read_settings
from rloo_cli.recipe.trl_keys import known_key
from rloo_cli.recipe.yaml_source import parse, read_text

MAX_EXTENDS = 20
"""Recipes in a chain."""


def read_chain(path: str, root: Fields, problems: Problems, environ: Mapping[str, str]) -> Settings:
    """The recipe's settings over those of the recipe that it extends, and so on; cycles and missing files are noted."""
    layers = [read_settings(root, Path(path).parent, problems)]
    chain = [path]
    while (entry := root.pairs.get("extends")) is not None:
        base = _base_of(entry.node, chain, problems, environ)
        tree = base and _read_base(base, entry.node.place, problems)
        if not base or not tree:
            break
        chain.append(base)
        layers.append(read_settings(tree, Path(base).parent, problems))
        root = tree
    settings = layers.pop()
    while layers:
        settings.put_over(layers.pop())
    return settings


def _base_of(node: Node, chain: list[str], problems: Problems, environ: Mapping[str, str]) -> str | None:
    """The path of the recipe that the last of the chain extends; None after a problem was noted."""
    if not isinstance(node, Scalar) or is_null(node) or "\0" in node.text:
        if not isinstance(node, Broken):
            problems.add(node.place, "extends", f"expected the path of one recipe, got {shown(node)}.")
        return None
    name, fault = expand_variables(node.text, environ)
    if fault:
        problems.add(node.place, "extends", fault)
        return None
    base = os.path.normpath(Path(chain[-1]).parent / name)
    if os.path.realpath(base) in map(os.path.realpath, chain):
        circle = " → ".join(printable(path, 200) for path in [*chain, base])
        problems.add(node.place, "extends", f"goes round in a circle: {circle}.")
        return None
    if len(chain) > MAX_EXTENDS:
        problems.add(node.place, "extends", f"a chain of more than {MAX_EXTENDS} recipes.")
        return None
    return base


def _read_base(base: str, place: Place, problems: Problems) -> Fields | None:
    unreadable = Problems()
    text = read_text(base, unreadable)
    if text is None:
        problems.add(place, "extends", unreadable.lines()[0])
        return None
    tree = parse(text, printable(base, 300), problems)
    if tree is not None and not isinstance(tree, Fields | Broken):
        problems.add(tree.place, "", f"expected a mapping of fields, got {shown(tree)}.")
    return tree if isinstance(tree, Fields) else None


# --- --set -----------------------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"[^.\[\]]+")
_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[\d+\])*")


def apply_override(settings: Settings, override: str, folder: Path, problems: Problems) -> None:
    """Put one `NAME=VALUE` over the settings; NAME is a leaf, a dotted path, or rewards[0].weight; VALUE is YAML."""
    name, equals, text = override.partition("=")
    name = name.strip()
    key = known_key(name.rpartition(".")[2])
    place = Place(f"--set {printable(name)}=…" if key and key.is_secret else f"--set {printable(override)}")
    if not equals or not _PATH.fullmatch(name):
        problems.add(place, "", "expected NAME=VALUE, such as `--set beta=0.1` or `--set generation.temperature=0.8`.")
        return
    count = problems.count
    value = parse(text, place.origin, problems, positions=False) or Scalar(place, "", True)
    if problems.count > count:
        return
    steps = _STEP.findall(name)
    if steps[0] == "extends":
        problems.add(place, "extends", "stands in a recipe's file, not on the command line.")
    elif steps[0] == "rewards" and len(steps) > 1:
        _set_reward(settings, steps[1:], value, place, problems)
    elif (leaf := _mapping_leaf(steps)) is not None:
        _set_below(settings, leaf, steps[steps.index(leaf) + 1 :], value, place, folder, problems)
    else:
        _set_keys(settings, steps, value, place, folder, problems)


def _set_keys(settings: Settings, steps: list[str], value: Node, place: Place, folder: Path, problems: Problems) -> None:
    if len(steps) > (2 if steps[0] in SECTIONS else 1):
        problems.add(place, ".".join(steps), f"there is nothing below `{steps[-2]}`; a path is `section.field`.")
        return
    for step in reversed(steps):
        value = Fields(place, {step: Pair(place, value)})
    assert isinstance(value, Fields)
    later = read_settings(value, folder, problems)
    if later.rewards.keys() == {"reward_weights"}:
        gather_rewards(settings, problems)  # new weights for the functions that are there
    settings.put_over(later)


def _mapping_leaf(steps: list[str]) -> str | None:
    """The leaf below which a path leads: `chat_template_kwargs` of data.chat_template_kwargs.enable_thinking."""
    leaf = steps[1] if steps[0] in SECTIONS and len(steps) > 2 else steps[0] if len(steps) > 1 else None
    if leaf is None or leaf not in LEAVES or LEAVES[leaf].shape.base != "mapping":
        return None
    return leaf if steps[0] in (leaf, LEAVES[leaf].section) else None


def _set_below(settings: Settings, leaf: str, steps: list[str], value: Node, place: Place, folder: Path, problems: Problems) -> None:
    entry = settings.leaves.get(leaf)
    old = entry.node if entry and not is_null(entry.node) else Fields(place, {})
    new, fault = _with_value(old, steps, value, place)
    if fault:
        problems.add(place, LEAVES[leaf].path, fault)
    else:
        settings.leaves[leaf] = Entry(entry.key_place if entry else place, new, folder)


def _set_reward(settings: Settings, steps: list[str], value: Node, place: Place, problems: Problems) -> None:
    gather_rewards(settings, problems)
    entry = settings.rewards.get("rewards")
    if entry is None or not isinstance(entry.node, Items):
        problems.add(place, "rewards", "the recipe has no list of rewards to change; set `rewards=[{function: …}]`.")
        return
    new, fault = _with_value(entry.node, steps, value, place)
    if fault:
        problems.add(place, "rewards", fault)
    else:
        settings.rewards["rewards"] = Entry(entry.key_place, new, entry.folder)


def _with_value(node: Node, steps: list[str], value: Node, place: Place) -> tuple[Node, str]:
    """The node with one value below it replaced, and the reason why that cannot be done, or an empty string."""
    if not steps:
        return value, ""
    step, rest = steps[0], steps[1:]
    if isinstance(node, Items):
        if not step.isdecimal() or len(step) > 6 or int(step) >= len(node.items):
            return node, f"`{printable(step)}` is no position in a list of {len(node.items)}; the first is [0]."
        new, fault = _with_value(node.items[int(step)], rest, value, place)
        return Items(node.place, (*node.items[: int(step)], new, *node.items[int(step) + 1 :])), fault
    if isinstance(node, Fields):
        old = node.pairs.get(step)
        new, fault = _with_value(old.node if old else Fields(place, {}), rest, value, place)
        return Fields(node.place, node.pairs | {step: Pair(place, new)}), fault
    return node, f"there is nothing below {shown(node)} to set `{printable(step)}` in."
