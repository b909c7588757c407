"""A script's reward functions: built-ins by their names here, others copied into a module that can be imported without training.

Importing the script itself would train, or at least import all of TRL in every worker. So a function is copied with what it needs of the
script's top level: imports, constants, other functions and classes, found by the names that they read.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.rewards.bindings import bound_names
from rloo_cli.trl_import.scope import BRANCHES, Unread
from rloo_cli.trl_import.values import Values, text_of

BUILT_INS: Mapping[str, str] = {
    "accuracy_reward": "accuracy_reward",
    "reasoning_accuracy_reward": "reasoning_accuracy_reward",
    "think_format_reward": "think_format_reward",
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_cosine_scaled_reward": "cosine_length_reward",
    "get_repetition_penalty_reward": "repetition_penalty_reward",
}
"""TRL's reward, or what makes it → the built-in that does the same, with parameters of the same names."""
TRAINS = (
    "RLOOTrainer",
    "RLOOConfig",
    "load_dataset",
    "from_pretrained",
    "parse_args",
    "parse_args_and_config",
    "TrlParser",
    "ArgumentParser",
)
"""Calls that a module of rewards has no use for; a name that needs one is not copied."""


@dataclass(slots=True)
class Rewards:
    """What `reward_funcs` comes to."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """As a recipe has them; copied functions by their names in the module."""
    copied: dict[str, str] = field(default_factory=dict)
    """Name in the module → the text that binds it, where that is none of the script's statements."""
    needed: set[int] = field(default_factory=set)
    """Positions of the script's top-level statements that the copied functions need."""
    notes: list[tuple[int, str]] = field(default_factory=list)

    def module_text(self, values: Values) -> str:
        """The module's source; empty where nothing is copied."""
        if not self.copied:
            return ""
        script, text = values.script, ""
        for i, statement in enumerate(script.tree.body):
            if i in self.needed or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                text += "\n\n" * is_definition + _source(script.source, statement) + "\n"
        made = "\n".join(f"{name} = {text}" for name, text in self.copied.items() if text)
        return f"{text}\n\n{made}\n" if made else text


def reward_entries(node: ast.expr, values: Values, *, module: str, takes_models: bool) -> Rewards:
    """The rewards of `reward_funcs=…`; what cannot be carried over is noted with its line.

    Args:
        node: the argument.
        values: of the script.
        module: the name of the module that copied functions go to.
        takes_models: whether a recipe's entry can name a reward model.
    """
    rewards = Rewards()
    known = values.script.functions.keys() | values.script.inner.keys() | values.script.imports.keys()
    if isinstance(node, ast.Name) and node.id not in known:
        try:
            node = values.script.value_of(node)
        except Unread as unread:
            rewards.notes.append((unread.line, f"reward_funcs: {unread.why}"))
            return rewards
    for item in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        before = set(rewards.needed)
        try:
            rewards.entries.append(_entry(item, rewards, values, module, takes_models))
        except Unread as unread:
            rewards.needed = before
            rewards.notes.append((unread.line, f"reward {text_of(item)}: {unread.why}"))
    return rewards


def _entry(item: ast.expr, rewards: Rewards, values: Values, module: str, takes_models: bool) -> dict[str, Any]:
    script = values.script
    if isinstance(item, ast.Constant) and isinstance(item.value, str):
        if not takes_models:
            raise Unread(item, "reward models are not in this version")
        return {"model": item.value}
    dotted = script.dotted(item)
    if isinstance(item, ast.Name | ast.Attribute) and "." in dotted:
        return _imported(item, dotted)
    if isinstance(item, ast.Name) and item.id in script.functions:
        _take(item.id, item, rewards, values)
        rewards.copied.setdefault(item.id, "")
        return {"function": f"{module}.{item.id}"}
    if isinstance(item, ast.Name) and item.id in script.inner:
        raise Unread(script.inner[item.id], f"`{item.id}` is defined inside another function: move it to the top level")
    if isinstance(item, ast.Name):
        return _entry(script.value_of(item), rewards, values, module, takes_models)
    if isinstance(item, ast.Call):
        called = script.dotted(item.func).split(".")[-1]
        if called in BUILT_INS and script.dotted(item.func).startswith("trl."):
            return _made(item, called, values)
        if called == "partial" and item.args:
            inner = _entry(item.args[0], rewards, values, module, takes_models)
            kwargs = {name: values.value(value) for name, value in values.keywords(item).items()}
            return {**inner, "kwargs": {**inner.get("kwargs", {}), **kwargs}}
    if isinstance(item, ast.Lambda | ast.Call):
        for name in _read_names(item):
            _take(name, item, rewards, values)
        name = _free("reward", {*rewards.copied, *script.functions})
        rewards.copied[name] = ast.unparse(item)
        return {"function": f"{module}.{name}"}
    raise Unread(item, "it is no function that can be copied")


def _imported(item: ast.expr, dotted: str) -> dict[str, Any]:
    name = dotted.split(".")[-1]
    if dotted.startswith("trl."):
        if BUILT_INS.get(name) != name:
            raise Unread(item, f"`{dotted}` has no counterpart here")
        return {"function": name}
    return {"function": dotted.lstrip(".")}


def _made(call: ast.Call, called: str, values: Values) -> dict[str, Any]:
    """The entry of a reward that one of TRL's factories makes."""
    names = {
        "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
        "get_repetition_penalty_reward": ("ngram_size", "max_penalty"),
    }
    positional = zip(names.get(called, ("max_len",)), call.args, strict=False)
    kwargs = {name: values.value(argument) for name, argument in positional}
    kwargs |= {name: values.value(value) for name, value in values.keywords(call).items()}
    return {"function": BUILT_INS[called], "kwargs": kwargs}


def _take(name: str, user: ast.AST, rewards: Rewards, values: Values) -> None:
    """Note the statements that bind a name, and those that they need in their turn.

    Raises:
        Unread: one of them trains, or a name is bound inside a function alone.
    """
    script = values.script
    positions = [i for i, statement in enumerate(script.tree.body) if name in _bound_in(statement)]
    if not positions and name not in dir(builtins) and name in script.bindings and not _is_parameter(name, user):
        raise Unread(
            user, f"it reads `{name}`, which line {script.bindings[name][0].line} binds inside a function: move that to the top level"
        )
    for i in positions:
        if i in rewards.needed:
            continue
        statement = script.tree.body[i]
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise Unread(statement, f"it reads `{name}`, which a relative import brings: name the function by its own module in the recipe")
        if (call := _training_call(statement, values)) is not None:
            raise Unread(
                statement, f"it reads `{name}`, whose statement calls {call}: a module of rewards must not train when it is imported"
            )
        rewards.needed.add(i)
        for needed in _read_names(statement):
            _take(needed, statement, rewards, values)


def _bound_in(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement binds, its branches included; none of the part that runs as a program alone."""
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return set()
    found = set(bound_names(statement)) if not isinstance(statement, BRANCHES) else set()
    for part in ast.iter_child_nodes(statement) if isinstance(statement, BRANCHES) else ():
        if isinstance(part, ast.stmt):
            found |= _bound_in(part)
        elif isinstance(part, ast.ExceptHandler):
            found |= set().union(*(_bound_in(inner) for inner in part.body)) if part.body else set()
    return found


def _read_names(node: ast.AST) -> Iterator[str]:
    return iter(dict.fromkeys(part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)))


def _is_parameter(name: str, node: ast.AST) -> bool:
    """Whether a function around or inside the node has a parameter or a variable of its own of this name."""
    arguments = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return name in arguments | stored


def _training_call(statement: ast.stmt, values: Values) -> str | None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return None
    names = (values.script.dotted(node.func).split(".")[-1] for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next((f"`{name}`" for name in names if name in TRAINS), None)


def _source(source: str, statement: ast.stmt) -> str:
    """A statement as it is written, with its decorators and the comments right above it."""
    lines = source.splitlines()
    first = min([statement.lineno, *(mark.lineno for mark in getattr(statement, "decorator_list", []))]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : statement.end_lineno])


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
