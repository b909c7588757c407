"""A split as prompts that are ready for the model, everything checked before a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from rloo_cli.data.chat import render_prompts
from rloo_cli.data.content import prompt_content
from rloo_cli.data.encoding import encode_texts
from rloo_cli.data.problems import Problems, name_columns
from rloo_cli.data.processor import VisualProcessor
from rloo_cli.data.prompt_set import PromptSet
from rloo_cli.data.row_images import RowImages, check_images, check_text_only, find_image_column
from rloo_cli.data.rows import Rows, SelectedRows
from rloo_cli.data.sources import read_split, source_name
from rloo_cli.errors import DataError
from rloo_cli.recipe.schema import DataSection
from rloo_cli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments that reward functions get from us; a column of the same name would be one of them."""
USUAL_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "text")
"""Columns that hold the prompt in data sets that people use."""
MANY_CHARACTERS = 1 << 20
"""From this length on a prompt is judged by its characters before it is tokenized."""
BATCH = 1024
"""Texts that are tokenized at once."""
BATCH_CHARACTERS = 1 << 20
"""Of the texts that are tokenized at once; a text alone may have more."""


def load_prompts(
    data: DataSection,
    *,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    max_samples: int | None,
    visual: VisualProcessor | None = None,
    columns: Sequence[str] | None = None,
) -> PromptSet:
    """The prompts of a split's first `max_samples` rows, checked, rendered and tokenized. `visual`: of a model that reads images;
    `columns`: those that are read, None = all.

    `max_prompt_tokens` bounds every prompt; longer ones are an error or left out and counted, as `data.overlong_prompts` says.

    Raises:
        RecipeError: the data set or split does not exist; messages without a chat template.
        DataError: rows or columns that cannot be used: the first ten and the count of the rest.
    """
    problems = Problems()
    rows = selected(read_split(data, split, problems, limit=max_samples), columns)
    source = source_name(data, split)
    prompts = prompts_of_rows(rows, data, source, problems, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens, visual=visual)
    if not len(prompts):
        raise DataError(f"{source}: every prompt is longer than {max_prompt_tokens:,} tokens; raise data.max_prompt_length.")
    return prompts


def selected(rows: Rows, columns: Sequence[str] | None) -> Rows:
    """The rows with these columns; None = all."""
    return rows if columns is None else SelectedRows(rows, tuple(columns))


def prompts_of_rows(
    rows: Rows,
    data: DataSection,
    source: str,
    problems: Problems,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    visual: VisualProcessor | None = None,
) -> PromptSet:
    """The prompts of rows that were read, which may be none; `problems`: found while reading. Raises as `load_prompts`."""
    image_column = find_image_column(rows, source, visual)
    images = RowImages(rows, data, visual, image_column) if visual is not None else None
    _check_columns(rows, data, source, problems, image_column)
    values = rows.column(data.prompt_column)
    is_chat = _check_contents(values, rows, data, problems)
    problems.raise_if_any()
    _check_parts(values, rows, data, images, problems)
    contents = (prompt_content(value, data.system_prompt) for value in values)
    if is_chat:
        messages = cast("Iterator[Sequence[Message]]", contents)
        if images is not None:
            messages = (images.messages(row, each) for row, each in enumerate(messages))
        texts = _rendered(messages, rows, data, tokenizer)
    else:
        texts = cast("Iterator[str]", contents)
    prompts = PromptSet(rows, data, source, images, is_chat=is_chat)
    _tokenize(texts, rows, prompts, data, tokenizer, max_prompt_tokens, images, is_chat=is_chat)
    return prompts


def _check_columns(rows: Rows, data: DataSection, source: str, problems: Problems, image_column: str | None) -> None:
    """Refuse a split without rows or prompt column, and columns that reward functions cannot get."""
    if not len(rows):
        problems.raise_if_any()
        raise DataError(f"{source}: holds no rows.")
    if data.prompt_column not in rows.columns:
        problems.raise_if_any()
        raise DataError(f"{source}: no column `{data.prompt_column}`; it has: {name_columns(rows.columns)}.{_suggest(data, rows.columns)}")
    for name in rows.columns:
        if name != data.prompt_column and name in RESERVED_COLUMNS:
            raise DataError(f"{source}: column `{name}` has the name of an argument that every reward function gets; rename it.")
    for name, what in rows.binary_columns().items():
        if name != image_column:
            raise DataError(
                f"{source}: column `{name}` holds {what}, which reward functions cannot get; remove the column. Images of the prompts come "
                "from a column named `image` or `images`."
            )


def _suggest(data: DataSection, columns: Sequence[str]) -> str:
    near = get_close_matches(data.prompt_column, columns, n=1) or [name for name in USUAL_NAMES if name in columns]
    return f" Did you mean `data.prompt_column: {near[0]}`?" if near else " Name the prompts' column as `data.prompt_column`."


def _check_contents(values: Sequence[Any], rows: Rows, data: DataSection, problems: Problems) -> bool:
    """Whether the prompts are messages; rows whose prompt is none, or of the other kind than the first, are noted."""
    kinds = ("a string", "messages")
    first: tuple[str, bool] | None = None
    for index, value in enumerate(values):
        try:
            prompt_content(value, data.system_prompt)
        except ValueError as error:
            problems.add(rows.place(index), f"`{data.prompt_column}` {error}{_misspelt(rows, index, data) if value is None else ''}")
            continue
        is_messages = isinstance(value, list)
        if first is None:
            first = rows.place(index), is_messages
        elif is_messages != first[1]:
            problems.add(
                rows.place(index), f"`{data.prompt_column}` is {kinds[is_messages]}, but {kinds[first[1]]} at {first[0]}; keep to one kind"
            )
    return first is not None and (first[1] or data.system_prompt is not None)


def _check_parts(values: Sequence[Any], rows: Rows, data: DataSection, images: RowImages | None, problems: Problems) -> None:
    """Raise DataError where images do not fit their messages, or a model of text gets content in parts."""
    if images is not None:
        check_images([prompt_content(value, data.system_prompt) for value in values], rows, images, problems)
    elif any(isinstance(value, list) for value in values):
        check_text_only([prompt_content(value, data.system_prompt) for value in values], rows, problems)
    problems.raise_if_any()


def _misspelt(rows: Rows, index: int, data: DataSection) -> str:
    names = [name for name, value in rows.row(index).items() if value is not None]
    near = get_close_matches(data.prompt_column, names, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def _rendered(contents: Iterable[Sequence[Message]], rows: Rows, data: DataSection, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The text of every row; an error after the last where some could not be rendered."""
    problems = Problems()
    for index, text in enumerate(render_prompts(contents, tokenizer=tokenizer, template_kwargs=data.chat_template_kwargs)):
        if isinstance(text, str):
            yield text
            continue
        problems.add(rows.place(index), f"the chat template failed: {text.reason}")
        yield ""  # keeps the place of the row; the error comes before anybody reads it
    problems.raise_if_any()


def _batches(texts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    characters = 0
    for row, text in texts:
        batch.append((row, text))
        characters += len(text)
        if len(batch) == BATCH or characters > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@functools.lru_cache(maxsize=2)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token: no text has fewer tokens than its length divided by this."""
    return max(map(len, tokenizer.get_vocab()))


def _tokenize(
    texts: Iterator[str],
    rows: Rows,
    prompts: PromptSet,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    images: RowImages | None,
    *,
    is_chat: bool,
) -> None:
    """Fill `prompts`, or tell which ones are empty or too long."""
    empty, too_long, unreadable = Problems(), Problems(), Problems()

    def fitting() -> Iterator[tuple[int, str]]:
        """Texts that are worth tokenizing: that takes 150 bytes of memory a character."""
        for row, text in enumerate(texts):
            least = len(text) // _longest_token(tokenizer) if len(text) > MANY_CHARACTERS else 0
            if least > max_prompt_tokens:
                too_long.add(rows.place(row), f"the prompt has at least {least:,} tokens; {max_prompt_tokens:,} is the most")
            else:
                yield row, text

    for batch in _batches(fitting()):
        encoded = encode_texts([text for _, text in batch], tokenizer=tokenizer, is_templated=is_chat)
        for (row, text), ids in zip(batch, encoded, strict=True):
            digest = ""
            if images is not None and images.column is not None:
                ids, digest = _with_images(row, text, ids, rows, images, unreadable)
            if not ids:
                empty.add(rows.place(row), "the prompt has no tokens")
            elif len(ids) > max_prompt_tokens:
                too_long.add(rows.place(row), f"the prompt has {len(ids):,} tokens; {max_prompt_tokens:,} is the most")
            else:
                prompts.append(row, ids, text if is_chat else None, digest)
    unreadable.raise_if_any()
    empty.raise_if_any()
    if data.overlong_prompts == "error":
        too_long.raise_if_any("Raise data.max_prompt_length, or leave such prompts out with `overlong_prompts: drop`.")
    prompts.dropped = len(too_long)


def _with_images(row: int, text: str, ids: list[int], rows: Rows, images: RowImages, unreadable: Problems) -> tuple[list[int], str]:
    """The ids of a prompt whose images take their places in it, and the images' digest; as they are where the row has none, or none readable."""
    try:
        made = images.encode(row, text)
    except ValueError as error:
        unreadable.add(rows.place(row), f"`{images.column}` {error}")
        return ids, ""
    return (ids, "") if made is None else (made[0], made[1].digest)
