"""Data and model that a program gave as objects: kept in the run's folder, where a resumed run and other processes find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.api.plain import CONFIG
from rloo_cli.errors import DataError, RecipeError, RefusedError
from rloo_cli.recipe.schema import ModelSection
from rloo_cli.run.atomic import AtomicFolder
from rloo_cli.run.folder import RunFolder

if TYPE_CHECKING:
    from datasets import Dataset

DATA, MODEL, TEMPLATE = "data", "model", "chat_template.jinja"
TRAIN, TEST = "train", "test"
ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What was given as objects; None = by name, or not at all."""

    train: Dataset | None = None
    test: Dataset | None = None
    model: Any = None
    """A model of transformers."""
    tokenizer: Any = None
    """Its tokenizer or processor; with a model that is named, one that differs from the model's own in its chat template alone."""

    @property
    def is_any(self) -> bool:
        """Whether there is something to keep."""
        return any(given is not None for given in (self.train, self.model, self.tokenizer))

    def fields(self, folder: RunFolder) -> dict[str, str]:
        """The fields of a recipe that name what is kept below the run's folder."""
        place = folder.inputs.absolute()
        fields: dict[str, str] = {}
        if self.train is not None:
            fields |= {"dataset_name": str(place / DATA), "dataset_train_split": TRAIN}
        if self.test is not None:
            fields["dataset_test_split"] = TEST
        if self.model is not None:
            fields["model_name_or_path"] = str(place / MODEL)
        elif self.tokenizer is not None:
            fields["chat_template_path"] = str(place / TEMPLATE)
        return fields

    def keep(self, folder: RunFolder) -> None:
        """Write all of it, complete or not at all, in place of what an attempt before training left.

        Raises:
            StorageError: it cannot be written.
            DataError: `datasets` cannot write the rows.
        """
        with AtomicFolder(folder.inputs, replace=True) as files:
            if self.train is not None:
                _write_data(self._splits(), files.path / DATA)
            if self.model is not None:
                self.model.save_pretrained(files.path / MODEL)
                self.tokenizer.save_pretrained(files.path / MODEL)
            elif self.tokenizer is not None:
                files.write(TEMPLATE, self.tokenizer.chat_template)

    def refuse_other(self, folder: RunFolder) -> None:
        """Raise RefusedError where a run that is gone on with began with other rows than were given now."""
        for split, given in self._splits().items():
            if not _same_rows(folder.inputs / DATA / split, given):
                raise RefusedError(
                    f"the rows of {split}_dataset are not those that {folder.path} began with ({folder.inputs / DATA}): give the same, or "
                    "start a new run."
                )

    def _splits(self) -> dict[str, Any]:
        return {name: rows for name, rows in ((TRAIN, self.train), (TEST, self.test)) if rows is not None}


def as_dataset(name: str, value: Any) -> Dataset | None:
    """Rows that were given as an argument of the trainer, as a `Dataset`; a list of dictionaries becomes one.

    Raises:
        RecipeError: it is none.
        DataError: the rows are of values that make no table.
    """
    import datasets

    if value is None or isinstance(value, datasets.Dataset):
        return value
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return _rows(name, value)
    if isinstance(value, datasets.IterableDataset):
        raise RecipeError(f"{CONFIG}: {name}: an IterableDataset cannot be kept for a resumed run: name its files or id in `dataset_name`.")
    if isinstance(value, dict):
        raise RecipeError(f"{CONFIG}: {name}: several splits were given ({', '.join(map(str, value))}): give one of them.")
    raise RecipeError(f"{CONFIG}: {name}: {type(value).__name__} is no Dataset.")


def _rows(name: str, rows: list[dict[Any, Any]]) -> Dataset:
    """A list of rows as a `Dataset`; one that no table can hold is told of, not its conversion."""
    import datasets
    import pyarrow as pa

    try:
        return datasets.Dataset.from_list(rows)
    except RecursionError as error:
        raise DataError(f"{CONFIG}: {name}: a value holds itself, or is nested too deeply.") from error
    except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{CONFIG}: {name}: the rows make no table, in which a column has one type: {reason}.") from error


def with_model(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """(a model object, its tokenizer): the one given, else that of the name which the model was loaded from.

    Raises:
        RecipeError: it is no model of transformers, or there is no tokenizer.
    """
    if hasattr(model, "peft_config"):
        raise RecipeError(f"{CONFIG}: model: an adapter is around it already: give the base model, and `peft_config`.")
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise RecipeError(f"{CONFIG}: model: {type(model).__name__} is neither a name nor a model of transformers.")
    if tokenizer is None:
        from rloo_cli.data.chat import load_tokenizer

        name = getattr(model.config, "_name_or_path", "")
        if not name:
            raise RecipeError(f"{CONFIG}: processing_class: give the model's tokenizer, it was not loaded from a folder that has one.")
        tokenizer = load_tokenizer(ModelSection(model_name_or_path=name))
    return model, tokenizer


def own_template(model: str, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The tokenizer, if it differs from that of the named model in its chat template; None where it does not differ.

    Raises:
        RecipeError: it differs in more, or the model has none.
    """
    from rloo_cli.data.chat import load_tokenizer

    given = getattr(tokenizer, "tokenizer", tokenizer)
    own = load_tokenizer(ModelSection(model_name_or_path=model), trust_remote_code=trust_remote_code)
    if given.get_vocab() != own.get_vocab() or given.eos_token_id != own.eos_token_id:
        raise RecipeError(
            f"{CONFIG}: processing_class: its tokens are not those of {model}'s own tokenizer: save the model and this one into a folder, "
            "and name that."
        )
    template = getattr(tokenizer, "chat_template", None)
    return tokenizer if template is not None and template != own.chat_template else None


def _write_data(splits: dict[str, Any], target: Path) -> None:
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    try:
        datasets.DatasetDict(splits).save_to_disk(target)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the data set that was given cannot be written: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error


def _same_rows(folder: Path, given: Any) -> bool:
    import datasets

    try:
        kept = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: the data that the run began with cannot be read: {error}") from error
    if len(kept) != len(given) or kept.features != given.features:
        return False
    pairs = zip(*(rows.with_format("arrow").iter(ROWS_AT_ONCE) for rows in (kept, given)), strict=True)
    return all(ours.equals(theirs) for ours, theirs in pairs)
