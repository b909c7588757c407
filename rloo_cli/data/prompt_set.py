"""The prompts of a split in little memory."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from rloo_cli.data.content import prompt_content
from rloo_cli.data.order import prompt_row
from rloo_cli.data.row_images import RowImages
from rloo_cli.data.rows import Rows
from rloo_cli.errors import DataError
from rloo_cli.recipe.schema import DataSection
from rloo_cli.types import Prompt, PromptContent, VisualInputs

PROMPTS_AT_ONCE = 64
"""Made between two looks for a stop."""


class PromptSet:
    """The prompts of a split, in the order of its rows: `len()`, and `[row]` for 0 ≤ row < len().

    Token ids and rendered texts lie in flat buffers, columns where they were read (saved data sets memory-mapped);
    a `Prompt` is made when it is asked for.
    """

    def __init__(self, rows: Rows, data: DataSection, source: str, images: RowImages | None = None, *, is_chat: bool = False) -> None:
        """`images`: of the rows, for a model that reads them; `is_chat`: whether the prompts are messages."""
        self.is_chat = is_chat
        self.source = source
        """Where the prompts come from, for messages."""
        self.dropped = 0
        """Prompts left out as too long."""
        self._rows = rows
        self._data = data
        self._images = images if images is not None and images.column is not None else None
        self._digests: list[str] = []
        self._kept = array("q")
        self._ids = array("i")
        self._id_ends = array("q")
        self._texts = bytearray()
        self._text_ends = array("q")

    def append(self, row: int, ids: list[int], text: str | None, digest: str = "") -> None:
        """Add the prompt of a row of the split; `text` is None where it is the content itself, `digest` names its images."""
        self._kept.append(row)
        if self._images is not None:
            self._digests.append(digest)
        self._ids.extend(ids)
        self._id_ends.append(len(self._ids))
        if text is not None:
            self._texts += text.encode()
            self._text_ends.append(len(self._texts))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        content, columns = self._content_and_columns(index)
        ids = self._ids[_start(self._id_ends, index) : self._id_ends[index]]
        text = self._text(index, content)
        visual = None
        if self._images is not None:
            visual = self._visual(index, text)
            columns[self._images.column or ""] = self._images.for_rewards(visual.images if visual is not None else ())
        return Prompt(row=index, content=content, text=text, token_ids=tuple(ids), columns=columns, visual=visual)

    def _visual(self, index: int, text: str) -> VisualInputs | None:
        """The prompt's images, read again.

        Raises:
            DataError: they are no longer those that were there when the prompts were loaded.
        """
        assert self._images is not None
        try:
            made = self._images.encode(self._kept[index], text)
        except ValueError as error:
            raise DataError(f"{self.place(index)}: `{self._images.column}` {error}.") from error
        visual = None if made is None else made[1]
        if ("" if visual is None else visual.digest) != self._digests[index]:
            raise DataError(f"{self.place(index)}: an image has changed since the prompts were loaded; leave the files alone.")
        return visual

    @property
    def size(self) -> int | None:
        """Prompts of one pass: as many as there are."""
        return len(self)

    def draw(self, first: int, count: int, *, seed: int, shuffle: bool, check_stop: Callable[[], None]) -> list[Prompt]:
        """The prompts at `count` positions of the endless order from `first` on; a stop is looked for on the way, since there may be millions."""
        found: list[Prompt] = []
        for position in range(first, first + count):
            if len(found) % PROMPTS_AT_ONCE == 0:
                check_stop()
            found.append(self[prompt_row(position, num_prompts=len(self), seed=seed, shuffle=shuffle)])
        return found

    def passes(self, position: int) -> float | None:
        """Passes over the prompts that end before a position."""
        return position / len(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that may come."""
        return int(self.lengths.max())

    @property
    def head(self) -> PromptSet:
        """The prompts that are there before training begins: itself."""
        return self

    def parts(self) -> list[PromptSet]:
        """The sets that it is mixed of: itself."""
        return [self]

    @property
    def has_images(self) -> bool:
        """Whether the data has a column of images."""
        return self._images is not None

    @property
    def image_column(self) -> str | None:
        """The name of that column; None where there is none."""
        return self._images.column if self._images is not None else None

    @property
    def first_with_images(self) -> int | None:
        """The first prompt that has images; None where none has."""
        return next((index for index, digest in enumerate(self._digests) if digest), None)

    def _content_and_columns(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        columns = self._rows.row(self._kept[index], without=self._images.column if self._images is not None else None)
        return prompt_content(columns.pop(self._data.prompt_column), self._data.system_prompt), columns

    def _text(self, index: int, content: PromptContent) -> str:
        if isinstance(content, str):
            return content
        return self._texts[_start(self._text_ends, index) : self._text_ends[index]].decode()

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column but the prompt: what reward functions may ask for by name."""
        return tuple(name for name in self._rows.columns if name != self._data.prompt_column)

    def column(self, name: str) -> list[Any]:
        """The values of a further column, one a prompt, JSON-able, None where a row lacks it; None for all images, which are too large together."""
        if name == self.image_column:
            return [None] * len(self)
        values = self._rows.column(name)
        return [values[row] for row in self._kept]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int64 of shape (len,)."""
        return np.diff(np.array(self._id_ends, dtype=np.int64), prepend=0)

    @property
    def largest_token(self) -> int:
        """The largest token id in any prompt."""
        return int(np.frombuffer(self._ids, dtype=self._ids.typecode).max())

    def repeats(self) -> tuple[int, tuple[int, int] | None]:
        """How many prompts have the tokens, and the images, of an earlier one, and the first pair (earlier, later)."""
        starts = [0, *self._id_ends[:-1]]
        kinds_of = zip(starts, self._id_ends, self._digests or itertools.repeat(""), strict=False)
        hashes = np.fromiter((hash((self._ids[start:end].tobytes(), digest)) for start, end, digest in kinds_of), np.int64)
        _, firsts, kinds = np.unique(hashes, return_index=True, return_inverse=True)
        later = np.flatnonzero(firsts[kinds] != np.arange(len(self)))
        return len(later), (int(firsts[kinds[later[0]]]), int(later[0])) if len(later) else None

    def place(self, index: int) -> str:
        """Where a prompt stands in the data: `file:line` or `dataset:split row N`."""
        return self._rows.place(self._kept[index])

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over content and columns of every prompt in order: equal for equal data, whatever its file format."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(json.dumps(self._content_and_columns(index), sort_keys=True).encode() + b"\n")
            if self._digests:
                digest.update(self._digests[index].encode() + b"\n")
        return digest.hexdigest()


def _start(ends: array[int], index: int) -> int:
    return ends[index - 1] if index else 0
