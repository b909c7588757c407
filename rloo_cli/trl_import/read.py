"""A script that trains by TRL's RLOOTrainer, as what a recipe needs of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.recipe.fields import LEAVES, REWARD_LEAVES
from rloo_cli.recipe.trl_keys import RENAMED, Treatment, known_key
from rloo_cli.trl_import.data import data_fields
from rloo_cli.trl_import.functions import Rewards, reward_entries
from rloo_cli.trl_import.objects import init_fields, lora_fields
from rloo_cli.trl_import.scope import TOO_DEEP, Script, Unread
from rloo_cli.trl_import.values import Values, text_of

TRAINER, CONFIG = "RLOOTrainer", "RLOOConfig"
ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""Of the trainer, in its order."""
LATER_CALLS = {"push_to_hub": "`hf upload` takes the run's final/ folder", "evaluate": "`rloo eval` scores a run's model"}
"""Methods of a trainer that scripts call after training → what stands in their place."""


@dataclass(slots=True)
class Found:
    """What a script says."""

    script: Script
    fields: dict[str, Any] = field(default_factory=dict)
    """By leaf name."""
    lines: dict[str, int] = field(default_factory=dict)
    """Leaf name → the line that says it."""
    rewards: Rewards = field(default_factory=Rewards)
    notes: list[tuple[int, str]] = field(default_factory=list)
    """(line, what could not be read or carried over, or was taken for granted)."""
    module: str = ""
    """Source of the module of reward functions; empty where none is needed."""

    def put(self, fields: Mapping[str, Any], line: int) -> None:
        """Note fields that a line says."""
        self.fields |= fields
        self.lines |= dict.fromkeys(fields, line)


def read_script(path: Path, *, module_name: str) -> Found:
    """What the script's one RLOOTrainer is given; `module_name` is that of the module that its reward functions go to.

    Raises:
        RecipeError: the file cannot be read.
        RefusedError: it makes no RLOOTrainer, or several.
    """
    try:
        return _read(path, module_name)
    except RecursionError as error:
        raise RecipeError(f"{path}: {TOO_DEEP}.") from error


def _read(path: Path, module_name: str) -> Found:
    script = Script.read(path)
    trainers = script.calls(TRAINER)
    if len(trainers) != 1:
        raise RefusedError(_not_one(script, trainers))
    reader = _Reader(Found(script), Values(script), module_name)
    reader.read(trainers[0])
    reader.found.notes += reader.values.notes
    reader.found.notes = sorted(dict.fromkeys(reader.found.notes))
    return reader.found


def _not_one(script: Script, trainers: list[ast.Call]) -> str:
    if trainers:
        lines = ", ".join(str(call.lineno) for call in trainers)
        return f"{script.path}: makes {len(trainers)} RLOOTrainers (lines {lines}): leave one of them, a recipe is one training."
    others = [name for name in ("GRPOTrainer", "PPOTrainer", "SFTTrainer", "DPOTrainer") if script.calls(name)]
    what = f" but a {others[0]}, which is another algorithm" if others else ""
    return f"{script.path}: makes no RLOOTrainer{what}; its config and arguments are what a recipe is made from."


@dataclass(slots=True)
class _Reader:
    found: Found
    values: Values
    module_name: str

    def read(self, trainer: ast.Call) -> None:
        arguments = self._arguments(trainer)
        for name, node in arguments.items():
            try:
                self._argument(name, node, arguments)
            except Unread as unread:
                self._note(unread.line, f"{name}: {unread.why}")
        self._assigned_later(arguments.get("args"))
        self._called_later()
        self._weigh()
        self.found.notes += self.found.rewards.notes

    def _note(self, line: int, text: str) -> None:
        self.found.notes.append((line, text))

    def _arguments(self, trainer: ast.Call) -> dict[str, ast.expr]:
        found: dict[str, ast.expr] = dict(zip(ARGUMENTS, trainer.args, strict=False))
        try:
            return found | self.values.keywords(trainer)
        except Unread as unread:
            self._note(unread.line, unread.why)
            return found | {keyword.arg: keyword.value for keyword in trainer.keywords if keyword.arg}

    def _argument(self, name: str, node: ast.expr, arguments: Mapping[str, ast.expr]) -> None:
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if name == "args":
            self._config(node)
        elif name == "model":
            self._model(node)
        elif name == "reward_funcs":
            self.found.rewards = reward_entries(node, self.values, module=self.module_name, takes_models="model" in REWARD_LEAVES)
            self.found.module = self.found.rewards.module_text(self.values)
        elif name == "train_dataset":
            self.found.put(data_fields(node, self.values), node.lineno)
        elif name == "eval_dataset":
            self._evaluation(node, arguments.get("train_dataset"))
        elif name == "peft_config":
            self._peft(node)
        elif name != "processing_class":  # its tokenizer is the model's
            self._note(node.lineno, f"{name}: `{text_of(node)}` is not carried over")

    # --- the config --------------------------------------------------------------------------------------------------------------

    def _config(self, node: ast.expr) -> None:
        if self.values.script.is_parsed(node):
            self._note(
                node.lineno,
                f"args: `{text_of(node)}` comes from the command line: put its options into the recipe, by the same names, or give them by "
                "--set; a YAML file for this script is a recipe as it is",
            )
            return
        call = self.values.script.value_of(node) if isinstance(node, ast.Name) else node
        if not isinstance(call, ast.Call) or self.values.script.dotted(call.func).split(".")[-1] != CONFIG:
            raise Unread(node, f"`{text_of(node)}` is no RLOOConfig(…) that can be read")
        keywords = self.values.keywords(call)
        if call.args:
            keywords = {"output_dir": call.args[0], **keywords}
        for name, value in keywords.items():
            try:
                self._config_field(name, value)
            except Unread as unread:
                self._note(unread.line, f"{name}: {unread.why}")

    def _config_field(self, name: str, node: ast.expr) -> None:
        value, line, today = self.values.value(node), node.lineno, RENAMED.get(name, name)
        if name == "model_init_kwargs" and isinstance(value, dict):
            self._init_kwargs(value, line)
        elif name == "trust_remote_code":
            if value:
                self._note(line, "trust_remote_code: a recipe cannot set it: `rloo train --trust-remote-code`")
        elif today in LEAVES or today == "reward_weights":
            self.found.put({today: value}, line)
        else:
            self._other_key(today, value, line)

    def _other_key(self, name: str, value: Any, line: int) -> None:
        key = known_key(name)
        if key is None:
            self._note(line, f"{name}: no key of TRL's RLOOConfig that is known here; left out")
        elif key.treatment is Treatment.NO_EFFECT or key.is_harmless(value):
            return
        else:
            shown = "its value" if key.is_secret else repr(value)
            self._note(line, f"{name}: {shown} is left out{f': {key.because}' if key.because else ', it is not in this version'}")

    def _init_kwargs(self, kwargs: Mapping[str, Any], line: int) -> None:
        fields, faults = init_fields({name: value for name, value in kwargs.items() if value is not None})
        for fault in faults:
            self._note(line, f"{fault} Left out.")
        for name, value in fields.items():
            if name == "trust_remote_code" or name not in LEAVES:
                self._other_key(name, value, line) if name != "trust_remote_code" else self._note(
                    line, "trust_remote_code: a recipe cannot set it: `rloo train --trust-remote-code`"
                )
            else:
                self.found.put({name: value}, line)

    def _assigned_later(self, args: ast.expr | None) -> None:
        """Take `training_args.beta = 0.1` between the config and the trainer."""
        if not isinstance(args, ast.Name):
            return
        for node in ast.walk(self.values.script.tree):
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == args.id:
                try:
                    self._config_field(target.attr, node.value)  # type: ignore[attr-defined]
                except Unread as unread:
                    self._note(unread.line, f"{target.attr}: {unread.why}")

    # --- the others --------------------------------------------------------------------------------------------------------------

    def _model(self, node: ast.expr) -> None:
        expression = self.values.script.value_of(node) if isinstance(node, ast.Name) else node
        if isinstance(expression, ast.Call) and self.values.script.dotted(expression.func).endswith(".from_pretrained") and expression.args:
            self.found.put({"model_name_or_path": self.values.value(expression.args[0])}, expression.lineno)
            for name, value in self.values.keywords(expression).items():
                try:
                    self._init_kwargs({name: self.values.value(value)}, value.lineno)
                except Unread as unread:
                    self._note(unread.line, f"model: {name}: {unread.why}")
            return
        self.found.put({"model_name_or_path": self.values.value(expression)}, node.lineno)

    def _evaluation(self, node: ast.expr, train: ast.expr | None) -> None:
        fields = data_fields(node, self.values)
        trained = data_fields(train, self.values) if train is not None else {}
        if fields.get("dataset_name") != trained.get("dataset_name") or fields.get("dataset_config") != trained.get("dataset_config"):
            raise Unread(node, "evaluation rows of another data set than that of training: put both into one, as two splits")
        self.found.put({"dataset_test_split": fields.get("dataset_train_split", "test")}, node.lineno)
        if "max_train_samples" in fields:
            self.found.put({"max_eval_samples": fields["max_train_samples"]}, node.lineno)

    def _peft(self, node: ast.expr) -> None:
        call = self.values.script.value_of(node) if isinstance(node, ast.Name) else node
        if isinstance(call, ast.Call) and self.values.script.dotted(call.func).endswith("get_peft_config"):
            raise Unread(node, "it comes from the command line: the options `use_peft`, `lora_r`, … are fields of the recipe")
        if not isinstance(call, ast.Call) or self.values.script.dotted(call.func).split(".")[-1] != "LoraConfig":
            raise Unread(node, f"`{text_of(node)}` is no LoraConfig(…) that can be read")
        fields, faults = lora_fields({name: self.values.value(value) for name, value in self.values.keywords(call).items()})
        for fault in faults:
            self._note(call.lineno, f"{fault} Left out.")
        for name, value in fields.items():
            if name in LEAVES:
                self.found.put({name: value}, call.lineno)
            else:
                self._other_key(name, value, call.lineno)

    def _weigh(self) -> None:
        """Put `reward_weights` into the entries."""
        weights, entries = self.found.fields.pop("reward_weights", None), self.found.rewards.entries
        if weights is None:
            return
        line = self.found.lines["reward_weights"]
        if not isinstance(weights, list) or len(weights) != len(entries):
            self._note(line, f"reward_weights: {weights!r} does not go with {len(entries)} reward(s) that could be carried over; left out")
            return
        for entry, weight in zip(entries, weights, strict=True):
            entry["weight"] = weight

    def _called_later(self) -> None:
        for line, name in self._methods():
            self._note(line, f"`.{name}(…)` after training is not carried over: {LATER_CALLS[name]}")

    def _methods(self) -> Iterator[tuple[int, str]]:
        """(line, name) of methods called on what is named a trainer."""
        for node in ast.walk(self.values.script.tree):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
            if is_method and node.func.attr in LATER_CALLS and "trainer" in node.func.value.id:  # type: ignore[attr-defined]
                yield node.lineno, node.func.attr  # type: ignore[attr-defined]
