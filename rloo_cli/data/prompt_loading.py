"""The prompts that a recipe's data section names: one set or several, in memory or streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.data.dataset import load_prompts, prompts_of_rows
from rloo_cli.data.mixture import Mixture
from rloo_cli.data.problems import Problems
from rloo_cli.data.processor import VisualProcessor
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.data.prompt_source import PromptSource
from rloo_cli.data.row_streams import StreamedSplit, Window, chain, open_split
from rloo_cli.data.sections import entry_section, test_splits
from rloo_cli.data.sources import read_split, source_name
from rloo_cli.data.streamed_prompts import StreamedPrompts
from rloo_cli.errors import DataError, RecipeError
from rloo_cli.recipe.schema import DataSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How rows become prompts."""

    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    """The longest prompt that there is room for."""
    is_bounded: bool
    """Whether recipe or model say so."""
    visual: VisualProcessor | None = None
    """Of a model that reads images."""

    def load(self, data: DataSection, split: str, *, limit: int | None, columns: Sequence[str] | None = None) -> PromptSet:
        """The prompts of a split in memory."""
        return load_prompts(
            data,
            split=split,
            tokenizer=self.tokenizer,
            max_prompt_tokens=self.max_prompt_tokens,
            max_samples=limit,
            visual=self.visual,
            columns=columns,
        )

    def make(self, window: Window) -> PromptSet:
        """The prompts of a window of a stream."""
        made = prompts_of_rows(
            window.rows,
            window.data,
            window.rows.place(0),
            Problems(),
            tokenizer=self.tokenizer,
            max_prompt_tokens=self.max_prompt_tokens,
            visual=self.visual,
        )
        if made.has_images:
            raise DataError(
                f"{window.rows.place(0)}: column `{made.image_column}`: images are not streamed in this version; leave dataset_streaming out "
                "(saved `datasets` folders are read where they lie)."
            )
        return made


def load_training_prompts(data: DataSection, reader: Reader) -> PromptSource:
    """The prompts that are trained on.

    Raises:
        RecipeError: a set or split does not exist, or cannot be streamed; messages without a chat template.
        DataError: rows or columns that cannot be used; of a stream, among its first rows.
    """
    if not data.datasets:
        if data.dataset_streaming:
            split = open_split(data, data.dataset_train_split, limit=data.max_train_samples)
            return _streamed(split, data, reader, source_name(data, data.dataset_train_split))
        return reader.load(data, data.dataset_train_split, limit=data.max_train_samples)
    weights = [entry.weight for entry in data.datasets if entry.weight is not None] or None
    if data.dataset_streaming and weights is None:
        return _one_after_the_other(data, reader)
    limits = _limits(data)
    return Mixture([_load_entry(data, i, reader, limits[i]) for i in range(len(data.datasets))], weights)


def load_evaluation_prompts(data: DataSection, reader: Reader, *, limit: int | None) -> PromptSet | Mixture:
    """The prompts that are evaluated on, in memory: those of the test split, or of the sets of a mixture that have one, set after set.

    Raises:
        RecipeError, DataError: as `load_training_prompts`.
    """
    if not data.datasets:
        assert data.dataset_test_split is not None
        return reader.load(data, data.dataset_test_split, limit=limit)
    splits = test_splits(data)
    found = []
    for i, split in splits.items():
        with _entry_named(i):
            found.append(reader.load(entry_section(data, data.datasets[i]), split, limit=limit, columns=data.datasets[i].columns))
    return found[0] if len(found) == 1 else Mixture(found, None)


def _load_entry(data: DataSection, i: int, reader: Reader, limit: int | None) -> PromptSource:
    entry = data.datasets[i]
    own = entry_section(data, entry)
    with _entry_named(i):
        if data.dataset_streaming:
            split = open_split(own, entry.split, columns=entry.columns, limit=limit)
            return _streamed(split, own, reader, source_name(own, entry.split))
        return reader.load(own, entry.split, limit=limit, columns=entry.columns)


def _one_after_the_other(data: DataSection, reader: Reader) -> StreamedPrompts:
    """A stream of all rows of all sets. Each set's first window is looked at now, so that all columns are known."""
    splits: list[StreamedSplit] = []
    sources: list[str] = []
    columns: dict[str, None] = {}
    for i, entry in enumerate(data.datasets):
        own = entry_section(data, entry)
        with _entry_named(i):
            splits.append(open_split(own, entry.split, columns=entry.columns, limit=data.max_train_samples))
            sources.append(source_name(own, entry.split))
            columns |= dict.fromkeys(_streamed(splits[i], own, reader, sources[i]).columns)
    prompts = _streamed(chain(splits), data, reader, " + ".join(sources))
    prompts.extra_columns = tuple(name for name in columns if name not in prompts.head.columns)
    return prompts


def _streamed(split: StreamedSplit, data: DataSection, reader: Reader, source: str) -> StreamedPrompts:
    return StreamedPrompts(
        split,
        reader.make,
        source=source,
        window_rows=data.shuffle_buffer_size,
        drops=data.overlong_prompts == "drop",
        longest=reader.max_prompt_tokens if reader.is_bounded else None,
    )


def _limits(data: DataSection) -> list[int | None]:
    """Rows that each set gives: all, its first `max_train_samples`, or as many as keep the sets' fractions and repeat no row."""
    fractions = [entry.fraction for entry in data.datasets if entry.fraction is not None]
    if not fractions:
        return [data.max_train_samples] * len(data.datasets)
    counts = [_count_rows(data, i) for i in range(len(data.datasets))]
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(count / share for count, share in zip(counts, shares, strict=True))
    return [max(1, round(share * total)) for share in shares]


def _count_rows(data: DataSection, i: int) -> int:
    entry = data.datasets[i]
    with _entry_named(i):
        return len(read_split(entry_section(data, entry), entry.split, Problems(), limit=data.max_train_samples))


@contextlib.contextmanager
def _entry_named(i: int) -> Iterator[None]:
    """Names the entry of a mixture in errors that name a field of the section."""
    try:
        yield
    except RecipeError as error:
        field = f"data.datasets[{i}]"
        for own, name in (("data.dataset_name:", "path"), ("data.dataset_config:", "name"), ("data:", "split")):
            if error.message.startswith(own):
                raise RecipeError(f"{field}.{name}:{error.message.removeprefix(own)}") from error
        raise
