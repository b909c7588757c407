"""Reward functions given as objects: by their path where another process can import them, else kept in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.api.plain import CONFIG, plain
from rloo_cli.errors import RecipeError
from rloo_cli.rewards import given
from rloo_cli.rewards.modules import find_module, search_path
from rloo_cli.rewards.parameters import PACKAGE
from rloo_cli.rewards.resolve import find_reward

MAIN = "__main__"


@dataclass(slots=True)
class Rewards:
    """The rewards of a trainer."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """As a recipe has them."""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Those that this process alone has, by the names that the entries hold."""

    @property
    def notice(self) -> str | None:
        """What it costs that functions cannot leave this process."""
        if not self.functions:
            return None
        names = ", ".join(f"`{name}`" for name in self.functions)
        return (
            f"{names}: given as objects that no other process can import, so called in this process: no deadline, no second try in a fresh "
            "process, and a crash in one ends the run. Written into a module beside the program, they run in workers."
        )


def rewards_of(reward_funcs: Any, weights: Sequence[float] | None, *, code_dir: Path) -> Rewards:
    """The rewards that `RLOOTrainer(reward_funcs=…)` means: a function, a name, an entry of a recipe, or a list of them.

    Args:
        reward_funcs: functions; dotted names, or those of built-ins; ids or folders of reward models; mappings with a recipe entry's fields.
        weights: `reward_weights` of the config; None = 1 each.
        code_dir: the program's folder, from which workers import.

    Raises:
        RecipeError: something is no reward, or there is another number of weights.
    """
    listed = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if weights is not None and len(weights) != len(listed):
        raise RecipeError(f"{CONFIG}: reward_weights: {len(weights)} weight(s) for {len(listed)} reward function(s).")
    rewards = Rewards()
    for i, item in enumerate(listed):
        entry = _entry(item, rewards, code_dir)
        rewards.entries.append(entry if weights is None else {**entry, "weight": weights[i]})
    return rewards


def _entry(item: Any, rewards: Rewards, code_dir: Path) -> dict[str, Any]:
    if isinstance(item, Mapping):
        rest = {name: plain(f"reward_funcs: {name}", value) for name, value in item.items() if name not in ("function", "model")}
        named = {**_entry(item["function"], rewards, code_dir)} if "function" in item else {"model": plain("model", item.get("model"))}
        return {**named, **rest}
    if isinstance(item, str):
        return {"model": item} if "/" in item or Path(item).is_dir() else {"function": item}
    if hasattr(item, "save_pretrained") or hasattr(item, "state_dict"):
        raise RecipeError(
            f"{CONFIG}: reward_funcs: a reward model is named by its id or folder, and a {type(item).__name__} object was given."
        )
    if not callable(item):
        raise RecipeError(f"{CONFIG}: reward_funcs: {type(item).__name__} is neither a function nor the name of one.")
    path = importable_name(item, code_dir=code_dir)
    if path is not None:
        return {"function": path}
    name = _free_name(_plain_name(item), rewards.functions)
    rewards.functions[name] = item
    return {"function": given.dotted(name), "name": name, "run_in": "trainer"}


def importable_name(function: Callable[..., Any], *, code_dir: Path) -> str | None:
    """The dotted path by which a worker finds this very function; None for what only this process has.

    Functions of the program that runs are among the latter: importing it would run it again.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == MAIN or not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not function:
        return None
    if module.startswith(f"{PACKAGE}.") and getattr(sys.modules[PACKAGE], name, None) is function:
        return f"{PACKAGE}.{name}"
    found, file = find_module(module, search_path(code_dir)), getattr(sys.modules[module], "__file__", None)
    if found is None or file is None or Path(found.file).resolve() != Path(file).resolve():
        return None
    try:
        find_reward(f"{module}.{name}", code_dir=code_dir)
    except RecipeError:  # its source cannot be read, or does not bind the name
        return None
    return f"{module}.{name}"


def _plain_name(function: Any) -> str:
    """A name for metrics: the function's own, that of what a partial calls, or that of an object's class."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return "reward" if name == "<lambda>" else "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
