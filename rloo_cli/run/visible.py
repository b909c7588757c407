"""Text of models and data sets, made safe for a terminal."""

from __future__ import annotations

import unicodedata

KEPT = "\n\u200c\u200d"
"""Line breaks, and the joiners that scripts and emoji need."""
ESCAPED_KINDS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control, format (text direction among them), lone surrogates, line and paragraph separators."""
TAB = "    "


def visible(text: str) -> str:
    r"""The text with everything that a terminal would obey spelled out; line breaks stay, tabs are spaces.

    >>> visible("a\x1b[2Jb\tc\u202ed")
    'a\\x1b[2Jb    c\\u202ed'
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def on_one_line(text: str, limit: int) -> str:
    """The text as `visible`, line breaks as ⏎, cut to `limit` characters."""
    shown = visible(" ⏎ ".join(text.split("\n")) if "\n" in text else text)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def _shown(character: str) -> str:
    if character == "\t":
        return TAB
    if character in KEPT or unicodedata.category(character) not in ESCAPED_KINDS:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()
