"""Small copies of images for a page. Their pixels are encoded anew, so that nothing else of a file comes along."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.data.images import decode_image
from rloo_cli.types import EncodedImage

if TYPE_CHECKING:
    from PIL import Image

LONGEST_SIDE = 192
"""Pixels of a small copy."""
EXACT_SIDE = 64
"""Images up to here are kept to the pixel."""
JPEG_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A small copy of an image."""

    uri: str
    """`data:image/png;base64,…`, or of `image/jpeg`, whichever is shorter."""
    width: int
    """Of the image itself, pixels; `height` too."""
    height: int


def make_thumbnail(data: bytes) -> Thumbnail | None:
    """Of the bytes of an image file; None where they are no image."""
    try:
        image = decode_image(EncodedImage(data=data, name="", digest=hashlib.sha256(data).hexdigest()))
    except ValueError:
        return None
    width, height = image.size
    image.info.clear()  # comments and profiles, which encoders would write
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    versions = {"png": _encoded(image, "PNG", optimize=True)}
    if max(width, height) > EXACT_SIDE:
        versions["jpeg"] = _encoded(image, "JPEG", quality=JPEG_QUALITY)
    kind = min(versions, key=lambda name: len(versions[name]))
    uri = f"data:image/{kind};base64,{base64.b64encode(versions[kind]).decode('ascii')}"
    return Thumbnail(uri=uri, width=width, height=height)


def _encoded(image: Image.Image, kind: str, **options: bool | int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()
