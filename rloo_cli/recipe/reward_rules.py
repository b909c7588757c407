"""Rules of the entries of `rewards`; see `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rloo_cli.recipe.fields import REWARD_LEAVES
from rloo_cli.recipe.rules import Context, Finding, Rule
from rloo_cli.recipe.schema import RewardEntry

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PASSED_ANYWAY = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
_REWARD_NAME = re.compile(r"[^\s/\\]+")


def is_dotted(function: str) -> bool:
    """Whether a reward's function is written as an import path."""
    return _DOTTED.fullmatch(function) is not None


def reward_name(entry: RewardEntry) -> str:
    """The reward's name in metrics: `name`, or the function's own, or the last part of the model's."""
    if entry.name is not None:
        return entry.name
    return entry.function.rpartition(".")[2] if entry.function is not None else (entry.model or "").rstrip("/").rpartition("/")[2]


_OF_FUNCTIONS = ("kwargs", "timeout", "call", "env", "run_in")
_OF_MODELS = ("revision", "dtype", "device", "batch_size", "max_length")


def _reward_kinds(context: Context) -> Iterator[Finding]:
    """A field of the other kind would be ignored; a resolved recipe writes the defaults out."""
    for i, entry in enumerate(context.recipe.rewards):
        kind, foreign = ("function", _OF_MODELS) if entry.model is None else ("model", _OF_FUNCTIONS)
        for name in foreign:
            if getattr(entry, name) != REWARD_LEAVES[name].info.get_default(call_default_factory=True):
                other = "models" if kind == "function" else "functions"
                yield Finding(f"rewards[{i}].{name}", f"this entry is a {kind}, and `{name}` is for {other}; remove it.")
        if entry.model is not None and not _REWARD_NAME.fullmatch(reward_name(entry)):
            yield Finding(f"rewards[{i}].model", "its name is no word, as metrics need it: write a `name:` beside it.")


def _reward_entries(context: Context) -> Iterator[Finding]:
    for i, entry in enumerate(context.recipe.rewards):
        if entry.function is not None and not is_dotted(entry.function):
            yield Finding(
                f"rewards[{i}].function",
                f"'{entry.function[:60]}' is no dotted import path such as my_rewards.exact, function `exact` of my_rewards.py.",
            )
        if entry.name is not None and not _REWARD_NAME.fullmatch(entry.name):
            yield Finding(f"rewards[{i}].name", "a name in metrics: one word, no spaces and no slashes.")
        for variable in entry.env:
            if not _VARIABLE.fullmatch(variable):
                yield Finding(f"rewards[{i}].env", f"'{variable[:60]}' is no name of an environment variable.")
        for name in _PASSED_ANYWAY & entry.kwargs.keys():
            yield Finding(f"rewards[{i}].kwargs.{name}", f"the trainer passes `{name}` itself; take another name.")
        if entry.function is not None and entry.run_in == "trainer" and entry.timeout != REWARD_LEAVES["timeout"].info.default:
            yield Finding(f"rewards[{i}].timeout", "not read: in the trainer there is no deadline.", is_notice=True)


def _reward_names(context: Context) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for i, entry in enumerate(context.recipe.rewards):
        name = reward_name(entry)
        if name in seen:
            yield Finding(f"rewards[{i}]", f"its name `{name[:60]}` is that of rewards[{seen[name]}]; give one of them a `name:`.")
        seen.setdefault(name, i)


def _reward_weights(context: Context) -> Iterator[Finding]:
    rewards = context.recipe.rewards
    if all(entry.weight == 0 for entry in rewards):
        yield Finding("rewards[0].weight", "every weight is 0: there is nothing to learn from.")


REWARD_RULES: tuple[Rule, ...] = tuple(
    Rule(frozenset({"rewards"}), check) for check in (_reward_kinds, _reward_entries, _reward_names, _reward_weights)
)
