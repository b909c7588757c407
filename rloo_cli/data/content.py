"""What a prompt column may hold, and what reward functions get from it.

- A string without a system prompt stays a string: it is used as it is, no chat template; completions are strings.
- Messages, and strings below a system prompt, become messages: the chat template renders them, completions are messages.
- A message's content is a string, or parts for vision-language models: `{"type": "text", "text": …}` and `{"type": "image"}`.
"""

from __future__ import annotations

from typing import Any

from rloo_cli.data.problems import quote
from rloo_cli.data.values import json_value
from rloo_cli.types import PromptContent

LAST_ROLES_REFUSED = ("system", "developer")


def prompt_content(value: Any, system_prompt: str | None) -> PromptContent:
    """The content of a row's prompt, a string or a list of message dicts, the system prompt put before it.

    Fields of a message that are None are left out (a table gives every message all fields of any), but for `content`.

    Raises:
        ValueError: the value is no prompt; the message says why, for the reader of `place: message`.
    """
    if value is None:
        raise ValueError("is missing or null")
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty")
        if system_prompt is None:
            return value
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"expected a string or a list of messages, got {quote(value)}")
    if not value:
        raise ValueError("is an empty list of messages")
    messages = [_message(item, number) for number, item in enumerate(value)]
    if messages[-1]["role"] in LAST_ROLES_REFUSED:
        raise ValueError(f"ends with a {messages[-1]['role']} message, to which nobody answers; the last role is user, tool or assistant")
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("has a system message of its own beside `data.system_prompt`; remove one of them")
    return [{"role": "system", "content": system_prompt}, *messages]


def _message(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"message {number}: expected an object with role and content, got {quote(item)}")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {number}: expected a role such as user, got {quote(role)}")
    if isinstance(content, list):
        return {**_further(item), "content": [_part(part, number) for part in content]}
    if not isinstance(content, str) and not (content is None and item.get("tool_calls")):
        raise ValueError(f"message {number}: expected a string as content, got {quote(content)}")
    return _further(item)


def _further(item: dict[str, Any]) -> dict[str, Any]:
    return {key: json_value(field) for key, field in item.items() if field is not None or key == "content"}


def _part(part: Any, number: int) -> dict[str, Any]:
    """A part of a content, its empty fields left out (a table gives every part all fields of any)."""
    given = {key: field for key, field in part.items() if field is not None} if isinstance(part, dict) else {}
    if given.get("type") == "text" and isinstance(given.get("text"), str):
        return {key: json_value(field) for key, field in given.items()}
    if given.get("type") == "image":
        if further := sorted(given.keys() - {"type"}):
            raise ValueError(f"message {number}: an image part with `{further[0]}`; the images come from the column `image` or `images`")
        return given
    raise ValueError(f"message {number}: expected a part of type text or image, got {quote(part)}")
