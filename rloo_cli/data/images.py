"""The images of a prompt: from a data set's cell to the bytes of image files, and from those to pixels.

A cell of `image` holds one image, a cell of `images` a list of them; an image is the bytes of a file, the storage of
`datasets`' Image feature (`{"bytes": …, "path": …}`), a PIL image, a path relative to the data file, or a data: URI.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.data.problems import quote
from rloo_cli.types import EncodedImage

if TYPE_CHECKING:
    from PIL import Image

IMAGE_COLUMNS = ("image", "images")
"""Columns of a data set that hold a prompt's images; a data set has one of them."""
LARGEST_IMAGE = 64 << 20
"""Bytes of one image file."""
DATA_URI = "data:"
MODES_WITH_ALPHA = ("RGBA", "LA", "PA")
WHITE = (255, 255, 255)


def image_column(columns: Sequence[str]) -> str | None:
    """The column that holds images, or None.

    Raises:
        ValueError: there are both.
    """
    found = [name for name in columns if name in IMAGE_COLUMNS]
    if len(found) > 1:
        raise ValueError("has both an `image` and an `images` column; keep one of them")
    return found[0] if found else None


def read_images(cell: Any, folders: Sequence[Path]) -> tuple[EncodedImage, ...]:
    """The images of a cell in order; none where it is null or an empty list.

    `folders`: where a relative path is looked for, in order.

    Raises:
        ValueError: the cell holds no images; the message goes behind `place: column`.
    """
    if cell is None:
        return ()
    cells = cell if isinstance(cell, list | tuple) else [cell]
    return tuple(_read_image(each, folders) for each in cells)


def _read_image(value: Any, folders: Sequence[Path]) -> EncodedImage:
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and not path:
            raise ValueError("holds an image without bytes and without a path")
        if data is None:
            return _from_path(str(path), folders)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError(f"holds an image whose `bytes` are no bytes: {quote(data)}")
        return _encoded(bytes(data), str(path or ""))
    if isinstance(value, bytes | bytearray | memoryview):
        return _encoded(bytes(value), "")
    if isinstance(value, str):
        return _from_uri(value) if value.startswith(DATA_URI) else _from_path(value, folders)
    if hasattr(value, "save") and hasattr(value, "convert"):  # a PIL image
        return _from_pil(value)
    raise ValueError(f"expected an image (bytes, a path, or what `datasets` stores), got {quote(value)}")


def _encoded(data: bytes, name: str) -> EncodedImage:
    if len(data) > LARGEST_IMAGE:
        raise ValueError(f"holds an image of {len(data):,} bytes; {LARGEST_IMAGE:,} is the most")
    return EncodedImage(data=bytes(data), name=name, digest=hashlib.sha256(data).hexdigest())


def _from_path(text: str, folders: Sequence[Path]) -> EncodedImage:
    if text.startswith(("http://", "https://")):
        raise ValueError(f"names an address ({quote(text)}); images are read from files: fetch it first")
    found = Path(text)
    try:
        if text.startswith("~/"):
            found = found.expanduser()
        if not found.is_absolute():
            found = next((folder / text for folder in folders if (folder / text).exists()), folders[0] / text)
        if found.stat().st_size > LARGEST_IMAGE:
            raise ValueError(f"names {found}, which has {found.stat().st_size:,} bytes; {LARGEST_IMAGE:,} is the most")
        if not found.is_file():
            raise ValueError(f"names {found}, which is no file")
        return _encoded(found.read_bytes(), text)
    except (OSError, RuntimeError) as error:
        why = f"{error.strerror} ({quote(str(found))})" if isinstance(error, OSError) else error
        raise ValueError(f"names the image {quote(text)}, which cannot be read: {why}") from error


def _from_uri(text: str) -> EncodedImage:
    head, _, content = text.partition(",")
    if not head.endswith(";base64"):
        raise ValueError("holds a data: URI that is not base64")
    try:
        return _encoded(base64.b64decode(content, validate=True), "")
    except binascii.Error as error:
        raise ValueError(f"holds a data: URI that is not base64: {error}") from error


def _from_pil(image: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return _encoded(buffer.getvalue(), "")


def data_uri(image: EncodedImage) -> str:
    """The image as text that can travel as JSON: `data:image/png;base64,…`."""
    return f"data:{media_type(image.data)};base64,{base64.b64encode(image.data).decode('ascii')}"


def media_type(data: bytes) -> str:
    """The media type of an image file, by its first bytes."""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tiff", b"MM\0*": "tiff"}
    return "image/" + next((kind for start, kind in kinds.items() if data.startswith(start)), "png")


def decode_image(image: EncodedImage) -> Image.Image:
    """The image in RGB, upright as its EXIF data say, transparency over white.

    Raises:
        ValueError: these bytes are no image, or one of too many pixels.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(image.data), mode="r")
            opened.load()
            upright = ImageOps.exif_transpose(opened) or opened
    except (OSError, ValueError, SyntaxError, ArithmeticError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"holds bytes that are no image: {' '.join(str(error).split())[:200]}") from error
    if upright.mode in MODES_WITH_ALPHA or "transparency" in upright.info:
        layered = upright.convert("RGBA")
        ground = Image.new("RGBA", layered.size, (*WHITE, 255))
        return Image.alpha_composite(ground, layered).convert("RGB")
    return upright.convert("RGB")
