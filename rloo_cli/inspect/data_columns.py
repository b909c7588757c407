"""The data set's columns for a stored prompt: rollouts hold prompts and completions, not gold answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rloo_cli.data.content import prompt_content
from rloo_cli.data.problems import Problems
from rloo_cli.data.sections import entry_section, test_splits
from rloo_cli.data.sources import read_split, source_name
from rloo_cli.errors import DataError, RefusedError
from rloo_cli.inspect.rollout_files import RolloutFile, RolloutKind
from rloo_cli.inspect.stored import StoredGroup, run_recipe
from rloo_cli.recipe.schema import DataSection


class PromptColumns:
    """Finds the row of a prompt in a split."""

    def __init__(self, data: DataSection, split: str) -> None:
        """Read the split.

        Raises:
            RecipeError, DataError: it does not exist, or cannot be read.
        """
        problems = Problems()
        self._rows = read_split(data, split, problems, limit=None)
        problems.raise_if_any()
        self._data = data
        self._source = source_name(data, split)
        if data.prompt_column not in self._rows.columns:
            raise DataError(f"{self._source}: no column `{data.prompt_column}` with the prompts.")
        self._contents = self._rows.column(data.prompt_column)
        self._by_content: dict[str, int] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column but the prompt."""
        return tuple(name for name in self._rows.columns if name != self._data.prompt_column)

    def columns_of(self, group: StoredGroup) -> dict[str, Any]:
        """Every column but the prompt.

        Raises:
            DataError: the prompt is not in the split.
        """
        row = self._row_of(group)
        if row is None:
            raise DataError(
                f"{self._source} has changed since: prompt row {group.prompt_row} of the rollouts is not in it. Name the data as it was by --data."
            )
        return {name: value for name, value in self._rows.row(row).items() if name != self._data.prompt_column}

    def has(self, group: StoredGroup) -> bool:
        """Whether the prompt is in the split."""
        return self._row_of(group) is not None

    def _row_of(self, group: StoredGroup) -> int | None:
        row = group.prompt_row
        if row is not None and row < len(self._rows) and self._key(row) == group.key:
            return row
        if self._by_content is None:  # over-long prompts were dropped, so that the numbers have moved
            self._by_content = {self._key(index): index for index in reversed(range(len(self._rows)))}
        return self._by_content.get(group.key)

    def _key(self, row: int) -> str:
        try:
            return json.dumps(prompt_content(self._contents[row], self._data.system_prompt), sort_keys=True)
        except ValueError:
            return ""


class MixedColumns:
    """Finds the row of a prompt in the sets of a mixture."""

    def __init__(self, sets: Sequence[PromptColumns]) -> None:
        self._sets = sets

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of any set, but the prompt."""
        return tuple(dict.fromkeys(name for part in self._sets for name in part.columns))

    def columns_of(self, group: StoredGroup) -> dict[str, Any]:
        """Every column but the prompt, None where its set lacks one. Raises DataError where no set has the prompt."""
        for part in self._sets:
            if part.has(group):
                return {**dict.fromkeys(self.columns), **part.columns_of(group)}
        return self._sets[0].columns_of(group)


def columns_source(file: RolloutFile, dataset: str | None) -> PromptColumns | MixedColumns:
    """Where the columns of a file's prompts are read: the run's own data set, or `dataset`, a file or folder.

    Raises:
        RefusedError: there is neither.
        RecipeError, DataError: it cannot be read.
    """
    recipe = run_recipe(file.run.recipe)
    if recipe is None and dataset is None:
        raise RefusedError(f"no recipe.yaml lies beside {file.path}: name the data that the prompts are from by --data, or say --no-data.")
    data = recipe.data if recipe is not None else DataSection(dataset_name=dataset or "")
    if dataset is not None:
        data = data.model_copy(update={"dataset_name": dataset, "dataset_config": None, "datasets": []})
    is_eval = file.kind is RolloutKind.EVAL
    if data.datasets:
        splits = test_splits(data) if is_eval else {i: entry.split for i, entry in enumerate(data.datasets)}
        return MixedColumns([PromptColumns(entry_section(data, data.datasets[i]), split) for i, split in splits.items()])
    split = data.dataset_test_split if is_eval else data.dataset_train_split
    return PromptColumns(data, split or data.dataset_train_split)


def needs_columns(parameters: tuple[str, ...], offered: Mapping[str, Any], *, takes_any_keyword: bool) -> bool:
    """Whether a function takes anything beside what every call offers."""
    return takes_any_keyword or bool(set(parameters) - set(offered))
