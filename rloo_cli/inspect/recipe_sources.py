"""Where each value of a resolved recipe comes from: a place in a file, `--set`, an older or other name of a key, a default, a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rloo_cli.recipe.batch import DEFAULT_DEVICE_BATCH
from rloo_cli.recipe.flat import flat_values
from rloo_cli.recipe.load import LoadedRecipe
from rloo_cli.recipe.reward_rules import reward_name

RENAMED_NOTICE = re.compile(r"(?P<place>.+): (?P<old>\w+): an older name of `(?P<field>[\w.]+)`; read as that\.")
SET = "--set "


class SourceKind(StrEnum):
    """Who said it."""

    FILE = "file"
    SET = "set"
    DEFAULT = "default"
    RULE = "rule"
    """Nobody: the field is null or `auto`, and a rule says what that comes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedValue:
    """A value and where it is from."""

    field: str
    value: Any
    kind: SourceKind
    place: str
    """`recipes/my.yaml:9:5`, `--set beta=0.1`, or empty."""
    note: str = ""
    """What else there is to know: the key's older name, what a rule makes of it."""

    @property
    def words(self) -> str:
        """Place and note, or the kind where there is no place."""
        if not self.place:
            return f"{self.kind}: {self.note}" if self.note else str(self.kind)
        return f"{self.place}, {self.note}" if self.note else self.place


def sourced_values(loaded: LoadedRecipe) -> list[SourcedValue]:
    """Every field in the order of the schema, with where it comes from."""
    renamed = {match["field"]: match["old"] for notice in loaded.notices if (match := RENAMED_NOTICE.fullmatch(notice))}
    ruled = dict(_ruled(loaded))
    return [_sourced(field, value, loaded, renamed, ruled) for field, value in flat_values(loaded.recipe).items()]


def _sourced(field: str, value: Any, loaded: LoadedRecipe, renamed: dict[str, str], ruled: dict[str, str]) -> SourcedValue:
    note = ruled.get(field, "")
    if not _is_written(field, loaded):
        return SourcedValue(field=field, value=value, kind=SourceKind.RULE if note else SourceKind.DEFAULT, place="", note=note)
    below = [f"{field}.{key}" for key in value] if isinstance(value, dict) else []
    place = ", ".join(dict.fromkeys(map(loaded.locate, [field, *below])))
    if field in renamed:
        note = f"there called {renamed[field]}"
    elif not note:
        note = _made_absolute(value, place, loaded)
    return SourcedValue(field=field, value=value, kind=SourceKind.SET if place.startswith(SET) else SourceKind.FILE, place=place, note=note)


def _is_written(field: str, loaded: LoadedRecipe) -> bool:
    """Whether a file or `--set` gives the field, or a key of the same meaning does."""
    prefix, _, name = field.rpartition(".")
    if prefix.startswith("rewards["):
        entry = loaded.recipe.rewards[int(prefix[len("rewards[") : -1])]
        return name in entry.model_fields_set
    return name in getattr(loaded.recipe, prefix).model_fields_set


def _made_absolute(value: Any, place: str, loaded: LoadedRecipe) -> str:
    """That a relative path was found beside its file, where it was; of a text in the very file only."""
    if not isinstance(value, str) or not value.startswith("/"):
        return ""
    match = re.fullmatch(r"(.*):(\d+):(\d+)", place)
    lines = loaded.source_text.splitlines()
    if match is None or match[1] != str(loaded.path) or int(match[2]) > len(lines):
        return ""
    return "" if value in lines[int(match[2]) - 1] else "found beside it"


def _ruled(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """What null and `auto` come to, as far as it is known before the model and the data are."""
    recipe, training = loaded.recipe, loaded.recipe.training
    if training.prompts_per_step is None:
        yield "training.prompts_per_step", f"{loaded.batch.prompts_per_step}, of the completions of a step"
        if training.per_device_train_batch_size is None:
            yield "training.per_device_train_batch_size", f"{DEFAULT_DEVICE_BATCH}, since prompts_per_step is not given either"
        if training.gradient_accumulation_steps is None:
            yield "training.gradient_accumulation_steps", "1"
    if training.steps_per_generation is None and training.generation_batch_size is None:
        yield "training.steps_per_generation", "one optimizer step"
    if recipe.evaluation.eval_strategy == "steps" and recipe.evaluation.eval_steps is None:
        yield "evaluation.eval_steps", f"{recipe.run.logging_steps}, as logging_steps"
    if recipe.algorithm.epsilon_high is None:
        yield "algorithm.epsilon_high", f"{recipe.algorithm.epsilon}, as epsilon"
    if recipe.run.num_processes == "auto":
        yield "run.num_processes", f"{loaded.num_processes} here"
    if recipe.run.output_dir is None:
        yield "run.output_dir", f"runs/{loaded.path.stem}-DATE-TIME"
    for i, entry in enumerate(recipe.rewards):
        if entry.name is None:
            yield f"rewards[{i}].name", f"{reward_name(entry)}, the function's"
