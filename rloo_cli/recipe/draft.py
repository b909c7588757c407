"""Settings on their way to a Recipe: values fitted to their fields, paths resolved, TRL's other keys judged, rules between fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rloo_cli.errors import RecipeError
from rloo_cli.recipe.accelerate_keys import StrategyName
from rloo_cli.recipe.fields import BROKEN, LEAVES, REWARD_LEAVES, SECTIONS, Leaf, closest, fit, shown
from rloo_cli.recipe.hub_rules import HUB_RULES
from rloo_cli.recipe.lora_rules import LORA_RULES
from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Pair, Place, Problems, Scalar, printable
from rloo_cli.recipe.paths import PATH_FIELDS, REWARD_PATH_FIELDS, expand_variables, resolve
from rloo_cli.recipe.reward_rules import REWARD_RULES, is_dotted
from rloo_cli.recipe.rules import RULES, Context
from rloo_cli.recipe.scalars import is_null, plain_data
from rloo_cli.recipe.schema import Recipe, RewardEntry
from rloo_cli.recipe.settings import Entry, Settings, without_effect
from rloo_cli.recipe.trl_keys import TRL_KEYS, Treatment, TrlKey, known_key
from rloo_cli.recipe.vllm_rules import VLLM_RULES

BUILT_IN_REWARDS = "rloo_cli.rewards"
MAX_REWARDS = 100
"""More are a mistake, and each costs time."""


@dataclass(slots=True)
class Draft:
    """The settings on their way to a Recipe."""

    settings: Settings
    origin: Place
    folders: list[Path]
    """Where relative paths are looked for, after the folder of the file that they stand in."""
    environ: Mapping[str, str]
    problems: Problems
    broken: set[str] = field(default_factory=set)
    """Dotted fields whose value is wrong or missing; `rewards` as a whole."""

    def recipe(self) -> Recipe:
        """The recipe, with a stand-in where a problem was noted."""
        values: dict[str, Any] = {section: {} for section in SECTIONS}
        for leaf in LEAVES.values():
            value = self._value(leaf)
            if value is not _UNSET:
                values[leaf.section][leaf.name] = value
        if (
            "dataset_name" not in values["data"]
            and not values["data"].get("datasets")
            and not self.broken & {"data.datasets", "data.dataset_name"}
        ):
            values["data"]["dataset_name"] = self._missing(LEAVES["dataset_name"])
        rewards = list(self._reward_values())
        if "rewards" in self.broken or not rewards:
            rewards = [{"function": "stand.in"}]
        try:
            return Recipe.model_validate(values | {"rewards": rewards})
        except ValidationError as error:  # a bound that the fitting does not know
            for fault in error.errors(include_url=False):
                self.problems.add(self.origin, ".".join(map(str, fault["loc"])), f"{fault['msg']}.")
            raise recipe_error(self.problems) from None

    def _value(self, leaf: Leaf) -> Any:
        entry = self.settings.leaves.get(leaf.name)
        node = None if entry is None else _adapted(entry.node, leaf)
        if entry is None or node is None:
            return self._missing(leaf) if leaf.is_required else _UNSET
        value = fit(node, leaf, lambda place, message: self.problems.add(place, leaf.path, message))
        if isinstance(value, str) and leaf.name in PATH_FIELDS:
            value = self._path(value, PATH_FIELDS[leaf.name], entry.folder, entry.node.place, leaf.path)
        if leaf.name == "datasets" and value is not BROKEN:
            value = self._entries_with_paths(value, entry)
        if value is not BROKEN:
            return value
        self.broken.add(leaf.path)
        return _STAND_IN if leaf.is_required else _UNSET

    def _missing(self, leaf: Leaf) -> str:
        if leaf.name not in self.settings.suspects:
            place = self.settings.sections.get(leaf.section, self.origin)
            self.problems.add(place, leaf.path, f"required: write `{leaf.name}: …` below `{leaf.section}:`.")
        self.broken.add(leaf.path)
        return _STAND_IN

    def _path(self, text: str, kind: str, folder: Path, place: Place, path: str) -> Any:
        """What a path-like value names, or BROKEN; `path`: the dotted field."""
        expanded, fault = expand_variables(text, self.environ)
        if not fault:
            expanded, fault = resolve(expanded, kind, [folder, *self.folders])
        if fault:
            self.problems.add(place, path, fault if fault.startswith("the env") else f"'{printable(text, 200)}': {fault}")
            return BROKEN
        return expanded

    def _entries_with_paths(self, entries: list[dict[str, Any]], written: Entry) -> Any:
        """The sets of a mixture, each path resolved as `dataset_name` is."""
        found = []
        for i, entry in enumerate(entries):
            field_path = f"data.datasets[{i}].path"
            place = _place_below(written.node, [str(i), "path"])
            path = self._path(entry["path"], PATH_FIELDS["dataset_name"], written.folder, place, field_path)
            found.append(entry | {"path": path})
        return BROKEN if any(entry["path"] is BROKEN for entry in found) else found

    # --- rewards -----------------------------------------------------------------------------------------------------------------

    def _reward_values(self) -> Iterator[dict[str, Any]]:
        entry = self.settings.rewards.get("rewards")
        if entry is None or is_null(entry.node):
            self._reward_problem(entry.key_place if entry else self.origin, "rewards", _NO_REWARDS)
        elif isinstance(entry.node, Items):
            if not entry.node.items:
                self._reward_problem(entry.node.place, "rewards", _NO_REWARDS)
            if len(entry.node.items) > MAX_REWARDS:
                self._reward_problem(
                    entry.node.place, "rewards", f"{len(entry.node.items)} reward functions; at most {MAX_REWARDS} are taken."
                )
                return
            for i, item in enumerate(entry.node.items):
                yield self._reward_value(item, f"rewards[{i}]", entry.folder)
        else:
            self._reward_problem(
                entry.node.place, "rewards", f"expected a list of entries that begin with `- function:`, got {shown(entry.node)}."
            )

    def _reward_problem(self, place: Place, name: str, message: str | Callable[[], str]) -> None:
        self.broken.add("rewards")
        entry = self.settings.rewards.get("rewards")
        if entry is None or not isinstance(entry.node, Broken):
            self.problems.add(place, name, message)

    def _reward_value(self, node: Node, name: str, folder: Path) -> dict[str, Any]:
        if not isinstance(node, Fields):
            if not isinstance(node, Broken):
                self._reward_problem(node.place, name, f"expected an entry such as `- function: accuracy_reward`, got {shown(node)}.")
            self.broken.add("rewards")
            return {}
        for key, pair in node.pairs.items():
            if key not in REWARD_LEAVES:
                self._reward_problem(pair.key_place, f"{name}.{printable(key)}", _unknown_reward_words(key))
        self._check_kind(node, name)
        values = {
            key: self._reward_field(REWARD_LEAVES[key], pair, name, folder) for key, pair in node.pairs.items() if key in REWARD_LEAVES
        }
        return {key: value for key, value in values.items() if value is not _UNSET}

    def _check_kind(self, node: Fields, name: str) -> None:
        """An entry has a function or a model."""
        given = [key for key in ("function", "model") if key in node.pairs and not is_null(node.pairs[key].node)]
        if len(given) == 2:
            self._reward_problem(node.pairs["model"].key_place, f"{name}.model", "`function` is given as well; an entry has one of them.")
        elif not given and not any(closest(key, ["function", "model"]) for key in node.pairs.keys() - {"function", "model"}):
            self._reward_problem(node.place, f"{name}.function", "required: the dotted import path of the function, or a `model:`.")

    def _reward_field(self, leaf: Leaf, pair: Pair, name: str, folder: Path) -> Any:
        node = _adapted(pair.node, leaf)
        if node is None:
            return _UNSET
        value = fit(node, leaf, lambda place, message: self.problems.add(place, f"{name}.{leaf.name}", message))
        if isinstance(value, str) and leaf.name in REWARD_PATH_FIELDS:
            value = self._path(value, REWARD_PATH_FIELDS[leaf.name], folder, node.place, f"{name}.{leaf.name}")
        if value is BROKEN:
            self.broken.add("rewards")
        elif leaf.name == "function" and value is not None and value.isidentifier():
            return f"{BUILT_IN_REWARDS}.{value}"
        return value

    # --- what is read beside the fields ------------------------------------------------------------------------------------------

    def check_other_keys(self) -> list[str]:
        """Judge the keys of TRL that are no fields here; the notice about those without effect, if there are any."""
        idle = []
        for name, entry in self.settings.others.items():
            key = known_key(name)
            value = plain_data(entry.node, lambda place, message, name=name: self.problems.add(place, name, message))  # type: ignore[misc]
            if key is None or isinstance(entry.node, Broken):
                continue
            if key.is_harmless(value):
                idle += [name] if key.treatment is Treatment.NO_EFFECT else []
            elif key.needs and self._is_off(key.needs):
                idle.append(name)
            elif not key.needs:  # else its master was refused already
                self.problems.add(entry.node.place, name, _refusal(entry.node, key))
        return [f"{self.origin.origin}: {without_effect(idle)}"] if idle else []

    def _is_off(self, name: str) -> bool:
        entry, key = self.settings.others.get(name), known_key(name)
        return entry is None or key is None or key.is_harmless(plain_data(entry.node, lambda *_: None))

    def check_rewards(self, recipe: Recipe, check_reward: Callable[[RewardEntry], None]) -> None:
        """Note the reward functions that cannot be found."""
        for i, entry in enumerate([] if "rewards" in self.broken else recipe.rewards):
            if entry.function is not None and not is_dotted(entry.function):
                continue  # a rule tells
            try:
                check_reward(entry)
            except RecipeError as error:
                field_path = f"rewards[{i}].{error.field or ('model' if entry.function is None else 'function')}"
                self.problems.add(self.locate(field_path), field_path, error.message)

    def check_rules(self, recipe: Recipe, num_processes: int, strategy: StrategyName = "ddp") -> list[str]:
        """Note what contradicts between fields that are right by themselves; the notices of those rules."""
        notices = []
        context = Context(recipe, num_processes, frozenset(self._given()), strategy)
        for rule in (*RULES, *REWARD_RULES, *VLLM_RULES, *LORA_RULES, *HUB_RULES):
            if rule.reads & self.broken:
                continue
            for finding in rule.check(context):
                if finding.is_notice:
                    notices.append(printable(f"{self.locate(finding.field)}: {finding.field}: {finding.message}", 2000))
                else:
                    self.problems.add(self.locate(finding.field), finding.field, finding.message)
        return notices

    def _given(self) -> Iterator[str]:
        for name, entry in self.settings.leaves.items():
            yield LEAVES[name].path
            if entry.is_flat:
                yield name

    def locate(self, field_path: str) -> Place:
        """The place of a dotted field, or the nearest written thing above it."""
        steps = re.findall(r"[^.\[\]]+", field_path)
        if steps and steps[0] in SECTIONS and (len(steps) == 1 or steps[1] not in self.settings.leaves):
            return self.settings.sections.get(steps[0], self.origin)
        steps = steps[1:] if steps and steps[0] in SECTIONS else steps
        entry = (self.settings.leaves | self.settings.rewards | self.settings.others).get(steps[0]) if steps else None
        return self.origin if entry is None else _place_below(entry.node, steps[1:])


_UNSET: Any = object()
_STAND_IN = "stand-in"
_NO_REWARDS = "at least one reward function is needed: `rewards:` with an entry `- function: accuracy_reward`."


def _place_below(node: Node, steps: Sequence[str]) -> Place:
    for step in steps:
        if isinstance(node, Items) and step.isdecimal() and int(step) < len(node.items):
            node = node.items[int(step)]
        elif isinstance(node, Fields) and step in node.pairs:
            node = node.pairs[step].node
        else:
            break
    return node.place


def _adapted(node: Node, leaf: Leaf) -> Node | None:
    """The node in the form that the schema has, from the forms that TRL's command takes; None = as if left out.

    null for what TRL leaves unset (`bf16: null`), an empty list or mapping for null, a single tracker or layer for a list of them.
    """
    if is_null(node) and not leaf.shape.nullable:
        trl = TRL_KEYS.get(leaf.name)
        unset = leaf.shape.base in ("list", "mapping") or (trl is not None and trl.default is None)
        return None if unset else node
    if leaf.name == "report_to":
        items = (node,) if isinstance(node, Scalar) else node.items if isinstance(node, Items) else ()
        if [item.text for item in items if isinstance(item, Scalar)] == ["none"] and len(items) == 1:
            return None
        return Items(node.place, items) if isinstance(node, Scalar) else node
    if leaf.name in _LISTS_OF_LAYERS and isinstance(node, Scalar):
        return Items(node.place, (node,))
    return node


_LISTS_OF_LAYERS = ("lora_target_modules", "lora_modules_to_save")


def _unknown_reward_words(key: str) -> str:
    guess = closest(key, REWARD_LEAVES)
    return f"unknown field.{f' Did you mean `{guess}`?' if guess else ''}"


def _refusal(node: Node, key: TrlKey) -> str:
    value = "this value" if key.is_secret or not isinstance(node, Scalar) else f"`{printable(node.text)}`"
    if key.treatment is Treatment.REFUSED:
        return f"{value} is refused: {key.because}."
    default = json.dumps(key.default)
    because = f": {key.because}" if key.because else ""
    if key.treatment is Treatment.SAME:
        return f"{value} is refused{because}; only {default} is offered."
    return f"{value} is not in this version{because}. Remove the key, or write TRL's default, {default}."


def recipe_error(problems: Problems) -> RecipeError:
    """The error that holds every problem, a line each; several are counted in a last line."""
    return RecipeError("\n".join([*problems.lines(), *([_count_line(problems)] if problems.count > 1 else [])]))


def _count_line(problems: Problems) -> str:
    section = problems.last_section()
    known = section if section in (*SECTIONS, "rewards") else None
    hint = f"`rloo schema --show {known}` lists that section's fields." if known else "`rloo schema --show all` lists every field."
    return f"{problems.count} errors. {hint}"
