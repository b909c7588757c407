"""Messages as the chat templates of vision-language models want them: content in parts, an image part for every image.

As TRL does it (`prepare_multimodal_messages`): where no message has a place for an image, all images stand before the
text of the first user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rloo_cli.types import Message

IMAGE_PART = {"type": "image"}


def in_parts(messages: Sequence[Message], num_images: int) -> list[dict[str, Any]]:
    """The messages with every content in parts, and `num_images` image parts among them.

    Raises:
        ValueError: there are places for images, but not as many as images; or no user message to put them into.
    """
    prepared = [{**message, "content": _parts(message.get("content"))} for message in messages]
    places = sum(_is_image(part) for message in prepared for part in message["content"] or ())
    if places == num_images:
        return prepared
    if places:
        raise ValueError(f"has places for {places} image{'s' * (places != 1)} ({{'type': 'image'}}), and the row {num_images}")
    first = next((message for message in prepared if message["role"] == "user"), None)
    if first is None:
        raise ValueError("has images, and no user message to put them into")
    first["content"] = [*(dict(IMAGE_PART) for _ in range(num_images)), *(first["content"] or ())]
    return prepared


def count_places(messages: Sequence[Message]) -> int:
    """Image parts of the messages."""
    return sum(_is_image(part) for message in messages if isinstance(message.get("content"), list) for part in message["content"])


def _parts(content: Any) -> list[dict[str, Any]] | None:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return None if content is None else [dict(part) for part in content]


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"
