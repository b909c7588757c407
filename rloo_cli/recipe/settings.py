"""Written keys, flat or in sections, old names or new, brought into one form: leaf → what was written, and where.

Nothing is typed here; `load.py` fits the values. A later layer (a recipe over the one that it extends, `--set` over both) wins leaf
by leaf; lists and mappings replace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.recipe.fields import LEAVES, SECTIONS, closest, shown
from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Pair, Place, Problems, Scalar, printable
from rloo_cli.recipe.scalars import FALSE_WORDS, is_null, number_in
from rloo_cli.recipe.trl_keys import OTHER_KEYS, RENAMED, TRL_KEYS, known_key

REWARD_MODEL_KEY = "reward_model_name_or_path"
REWARD_KEYS = ("rewards", REWARD_MODEL_KEY, "reward_funcs", "reward_weights")
TOP_KEYS = (*SECTIONS, *REWARD_KEYS, "extends")


@dataclass(frozen=True, slots=True)
class Entry:
    """One written value."""

    key_place: Place
    node: Node
    folder: Path
    """The folder of the file that it stands in; relative paths begin there."""
    is_flat: bool = False
    """Whether it stood at the top level."""


@dataclass(slots=True)
class Settings:
    """What a file, or several files one over the other, say."""

    leaves: dict[str, Entry] = field(default_factory=dict)
    """By leaf name; names are unique over the sections."""
    rewards: dict[str, Entry] = field(default_factory=dict)
    """By REWARD_KEYS."""
    others: dict[str, Entry] = field(default_factory=dict)
    """Keys of TRL that are no fields here."""
    sections: dict[str, Place] = field(default_factory=dict)
    """Where a section was opened."""
    suspects: set[str] = field(default_factory=set)
    """Leaves that a misspelt key probably means: that they are missing is not said a second time."""
    notices: list[str] = field(default_factory=list)

    def put_over(self, later: Settings) -> None:
        """Let the later settings win."""
        self.leaves |= later.leaves
        self.others |= later.others
        self.sections |= later.sections
        self.suspects |= later.suspects
        self.notices += later.notices
        if later.rewards.keys() - {"reward_weights"}:
            self.rewards = dict(later.rewards)
        else:
            self.rewards |= later.rewards


def read_settings(root: Fields, folder: Path, problems: Problems) -> Settings:
    """One file's keys in canonical form; unknown and doubled keys are noted as problems. `extends` is left to the caller."""
    return _Reader(folder, problems).read(root)


@dataclass(slots=True)
class _Reader:
    folder: Path
    problems: Problems
    settings: Settings = field(default_factory=Settings)

    def read(self, root: Fields) -> Settings:
        for key, pair in root.pairs.items():
            name = RENAMED.get(key, key)
            if key in SECTIONS:
                self._section(key, pair)
            elif name in REWARD_KEYS:
                self._put(self.settings.rewards, key, name, pair, None)
            elif key != "extends":
                self._field(key, pair, None)
        self._check_reward_keys()
        return self.settings

    def _section(self, section: str, pair: Pair) -> None:
        self.settings.sections.setdefault(section, pair.key_place)
        if isinstance(pair.node, Fields):
            for key, inner in pair.node.pairs.items():
                self._field(key, inner, section)
        elif not isinstance(pair.node, Broken) and not is_null(pair.node):
            self.problems.add(pair.node.place, section, f"expected this section's fields, indented below it, got {shown(pair.node)}.")

    def _field(self, key: str, pair: Pair, section: str | None) -> None:
        name = RENAMED.get(key, key)
        if name in LEAVES:
            self._leaf(key, name, pair, section)
        elif known_key(name):
            self._put(self.settings.others, key, name, pair, section)
        else:
            self._unknown(key, pair, section)

    def _leaf(self, key: str, name: str, pair: Pair, section: str | None) -> None:
        leaf = LEAVES[name]
        if section not in (None, leaf.section) and key == name:
            self.problems.add(pair.key_place, f"{section}.{key}", f"stands in the wrong section; it is a field of `{leaf.section}`.")
        if key == "warmup_ratio" and not _is_share(pair.node):
            self.problems.add(pair.node.place, leaf.path, "warmup_ratio is a share of all steps, from 0 to below 1.")
            pair = Pair(pair.key_place, Broken(pair.node.place))
        self._put(self.settings.leaves, key, name, pair, section)

    def _put(self, table: dict[str, Entry], key: str, name: str, pair: Pair, section: str | None) -> None:
        if key != name:
            full = LEAVES[name].path if name in LEAVES else name
            self.settings.notices.append(f"{pair.key_place}: {key}: an older name of `{full}`; read as that.")
        if name in table:
            first = table[name].key_place
            where = f"line {first.line}" if first.line else str(first)
            full = LEAVES[name].path if name in LEAVES else name
            self.problems.add(pair.key_place, full, f"given twice: here and on {where}. Keep one.")
            return
        table[name] = Entry(pair.key_place, pair.node, self.folder, section is None)

    def _unknown(self, key: str, pair: Pair, section: str | None) -> None:
        if section is None and isinstance(pair.node, Fields) and (guess := closest(key, SECTIONS)):
            self.problems.add(pair.key_place, printable(key), f"unknown section. Did you mean `{guess}`?")
            self._section(guess, pair)
            return
        name = f"{section}.{printable(key)}" if section else printable(key)
        if len(self.problems.found) < 1000:
            guess = _guess_field(key, section)
            self.settings.suspects |= {guess} if guess and guess in LEAVES else set()
            self.problems.add(pair.key_place, name, _unknown_words(guess, section))
        else:
            self.problems.add(pair.key_place, name, "unknown field.")

    def _check_reward_keys(self) -> None:
        rewards = self.settings.rewards
        for key in REWARD_KEYS[1:]:
            if "rewards" in rewards and key in rewards:
                remedy = "write `weight:` in each entry of `rewards`" if key == "reward_weights" else "list the functions in one of them"
                remedy = "write it as an entry `- model:` there" if key == REWARD_MODEL_KEY else remedy
                self.problems.add(rewards.pop(key).key_place, key, f"`rewards` is given as well; {remedy}.")


def _is_share(node: Node) -> bool:
    number = number_in(node.text) if isinstance(node, Scalar) else None
    return not isinstance(number, int | float) or 0 <= number < 1  # what is no number is said when the field is fitted


def _guess_field(key: str, section: str | None) -> str | None:
    if section is None:
        return closest(key, [*LEAVES, *TOP_KEYS, *TRL_KEYS, *OTHER_KEYS, *RENAMED])
    own = closest(key, SECTIONS[section].model_fields)
    return own or closest(key, [*LEAVES, *TRL_KEYS, *OTHER_KEYS, *RENAMED])


def _unknown_words(guess: str | None, section: str | None) -> str:
    if guess is None:
        return "unknown field."
    elsewhere = f" (section `{LEAVES[guess].section}`)" if section and guess in LEAVES and LEAVES[guess].section != section else ""
    return f"unknown field. Did you mean `{guess}`{elsewhere}?"


# --- rewards in TRL's words ------------------------------------------------------------------------------------------------------


def gather_rewards(settings: Settings, problems: Problems) -> None:
    """Turn `reward_model_name_or_path`, `reward_funcs` and `reward_weights` into `rewards`, in place; the model comes first, as in TRL."""
    model = settings.rewards.pop(REWARD_MODEL_KEY, None)
    funcs, weights = settings.rewards.pop("reward_funcs", None), settings.rewards.pop("reward_weights", None)
    model = None if model is not None and is_null(model.node) else model
    funcs = None if model is not None and funcs is not None and is_null(funcs.node) else funcs
    written = model or funcs
    if written is not None:
        entries = Items(written.node.place, ()) if funcs is None else _entries_of(funcs.node, funcs.folder, problems)
        if model is not None and isinstance(entries, Items):
            first = Fields(model.node.place, {"model": Pair(model.key_place, model.node)})
            entries = Items(entries.place, (first, *entries.items))
        settings.rewards["rewards"] = Entry(written.key_place, entries, written.folder, True)
    if weights is not None and not is_null(weights.node):
        _put_weights(settings, weights, problems)


def gather_streaming(settings: Settings) -> None:
    """Turn TRL's `streaming`, which says of a mixture what `dataset_streaming` says of one set, into that, in place."""
    entry = settings.others.pop("streaming", None)
    if entry is None or is_null(entry.node):
        return
    if not (isinstance(entry.node, Scalar) and entry.node.text in FALSE_WORDS and "dataset_streaming" in settings.leaves):
        settings.leaves["dataset_streaming"] = entry


def _entries_of(node: Node, folder: Path, problems: Problems) -> Node:
    items = (node,) if isinstance(node, Scalar) and not is_null(node) else node.items if isinstance(node, Items) else None
    if items is None:
        if not isinstance(node, Broken):
            problems.add(node.place, "reward_funcs", f"expected a list of reward functions, got {shown(node)}.")
        return Broken(node.place)
    return Items(node.place, tuple(_entry_of(item, folder, problems) for item in items))


def _entry_of(item: Node, folder: Path, problems: Problems) -> Node:
    if not isinstance(item, Scalar):
        if not isinstance(item, Broken):
            problems.add(
                item.place, "reward_funcs", f"expected the name of a function, got {shown(item)}; entries with more belong to `rewards`."
            )
        return Broken(item.place)
    return Fields(item.place, {"model" if _is_model(item.text, folder) else "function": Pair(item.place, item)})


def _is_model(name: str, folder: Path) -> bool:
    """Whether an item of `reward_funcs` is a reward model, as TRL's trainer has them there: a hub id, or a folder with a configuration."""
    if name.endswith(".py") or ":" in name:  # a function, as others write them; what to write is said where functions are looked for
        return False
    return "/" in name or any((place / name / "config.json").is_file() for place in (folder, Path()))


def _put_weights(settings: Settings, weights: Entry, problems: Problems) -> None:
    rewards = settings.rewards.get("rewards")
    if rewards is None:
        problems.add(weights.key_place, "reward_weights", "there are no `reward_funcs` for these weights.")
    elif not isinstance(weights.node, Items):
        if not isinstance(weights.node, Broken):
            problems.add(
                weights.node.place, "reward_weights", f"expected a list of numbers, one a reward function, got {shown(weights.node)}."
            )
    elif isinstance(rewards.node, Items):
        entries = rewards.node.items
        if len(entries) != len(weights.node.items):
            counts = f"{len(weights.node.items)} weight{'s' * (len(weights.node.items) != 1)} for {len(entries)} reward functions"
            problems.add(weights.node.place, "reward_weights", f"{counts}.")
            return
        weighted = tuple(_weighted(entry, weight) for entry, weight in zip(entries, weights.node.items, strict=True))
        settings.rewards["rewards"] = Entry(rewards.key_place, Items(rewards.node.place, weighted), rewards.folder, True)


def _weighted(entry: Node, weight: Node) -> Node:
    if not isinstance(entry, Fields):
        return entry
    return Fields(entry.place, entry.pairs | {"weight": Pair(weight.place, weight)})


# --- keys of TRL that are no fields ----------------------------------------------------------------------------------------------


def without_effect(keys: Iterable[str]) -> str:
    """The one notice about keys that were accepted and change nothing."""
    reasons = []
    for name in keys:
        key = known_key(name)
        reasons.append(f"{name} ({key.because})" if key and key.because else name)
    return f"accepted without effect: {', '.join(reasons)}."
