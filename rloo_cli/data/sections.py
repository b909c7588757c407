"""The sets of a mixture, each as the data section that reads it."""

from __future__ import annotations

from rloo_cli.recipe.schema import DataSection, DatasetEntry


def test_splits(data: DataSection) -> dict[int, str]:
    """Position of a set of the mixture → its test split: as the entries say, or where none does `dataset_test_split` of each."""
    named = {i: entry.test_split for i, entry in enumerate(data.datasets) if entry.test_split is not None}
    return named or (dict.fromkeys(range(len(data.datasets)), data.dataset_test_split) if data.dataset_test_split is not None else {})


def entry_section(data: DataSection, entry: DatasetEntry) -> DataSection:
    """The section that reads one set of a mixture."""
    own = {"dataset_name": entry.path, "dataset_config": entry.name, "prompt_column": entry.prompt_column or data.prompt_column}
    return data.model_copy(update={**own, "datasets": []})
