"""The images of a split's rows: read when a row is asked for, so that pixels are in memory for the prompts in use alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_cli.data.images import IMAGE_COLUMNS, data_uri, image_column, read_images
from rloo_cli.data.multimodal import count_places, in_parts
from rloo_cli.data.problems import Problems
from rloo_cli.data.processor import VisualProcessor
from rloo_cli.data.rows import Rows
from rloo_cli.errors import DataError
from rloo_cli.recipe.schema import DataSection
from rloo_cli.types import EncodedImage, Message, PromptContent, VisualInputs


class RowImages:
    """Images by row of the split, for a model that reads them. Without an image column no row has any."""

    def __init__(self, rows: Rows, data: DataSection, visual: VisualProcessor, column: str | None) -> None:
        self.column = column
        """`image`, `images` or None."""
        self._rows = rows
        self._visual = visual
        self._folders = image_folders(data)

    def read(self, row: int) -> tuple[EncodedImage, ...]:
        """The images of a row, in order.

        Raises:
            ValueError: the cell holds none.
        """
        return () if self.column is None else read_images(self._rows.cell(row, self.column), self._folders)

    def messages(self, row: int, content: Sequence[Message]) -> list[dict[str, Any]]:
        """The row's messages in parts, with a place for each of its images.

        Raises:
            ValueError: they cannot be put into the messages, or read.
        """
        return in_parts(content, len(self.read(row)))

    def encode(self, row: int, text: str) -> tuple[list[int], VisualInputs] | None:
        """The ids of a rendered prompt and its images; None where the row has none.

        Raises:
            ValueError: an image cannot be read, or does not fit the prompt.
        """
        images = self.read(row)
        return self._visual(text, images) if images else None

    def for_rewards(self, images: Sequence[EncodedImage]) -> str | list[str] | None:
        """What reward functions get as the column: data: URIs, which travel as JSON."""
        uris = [data_uri(image) for image in images]
        return uris if self.column == "images" else uris[0] if uris else None


def image_folders(data: DataSection) -> tuple[Path, ...]:
    """Where the relative paths of a data set's images begin: beside its files."""
    path = Path(data.dataset_name or "").expanduser()
    if not path.is_dir():
        return (path.parent,)
    own = path / data.dataset_config if data.dataset_config else path
    return (own, own / "data", path)


def find_image_column(rows: Rows, source: str, visual: VisualProcessor | None) -> str | None:
    """The split's column of images.

    Raises:
        DataError: two of them, or one beside a model that reads no images.
    """
    try:
        column = image_column(rows.columns)
    except ValueError as error:
        raise DataError(f"{source}: {error}.") from error
    if column is not None and visual is None:
        raise DataError(
            f"{source}: column `{column}` holds images, and the model reads text only: name a vision-language model as "
            "model.model_name_or_path, or remove or rename the column."
        )
    return column


def check_images(contents: Sequence[PromptContent], rows: Rows, images: RowImages, problems: Problems) -> None:
    """Note the rows whose images cannot be read or put into their messages."""
    for row, content in enumerate(contents):
        try:
            if not isinstance(content, str):
                images.messages(row, content)
            elif images.read(row):
                raise ValueError("stands beside a prompt that is a string: images need messages, or data.system_prompt")
        except ValueError as error:
            problems.add(rows.place(row), f"`{images.column or 'prompt'}` {error}")


def check_text_only(contents: Sequence[PromptContent], rows: Rows, problems: Problems) -> None:
    """Note the rows whose messages have content in parts, which chat templates of models of text do not write."""
    for row, content in enumerate(contents):
        if isinstance(content, str):
            continue
        if count_places(content):
            problems.add(rows.place(row), "the prompt has places for images, and the model reads text only")
        elif any(isinstance(message.get("content"), list) for message in content):
            problems.add(rows.place(row), "the prompt has content in parts, which is for vision-language models; make it one string")


__all__ = ["IMAGE_COLUMNS", "RowImages", "check_images", "check_text_only", "find_image_column", "image_folders"]
