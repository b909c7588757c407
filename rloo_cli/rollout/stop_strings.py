"""Finds stop strings in completions while they grow, across token boundaries and multi-byte characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a multi-byte character to


@dataclass(slots=True)
class _Tail:
    """The end of one row's text."""

    tokens: list[int] = field(default_factory=list)
    """Token ids since the last place where the text was known to be complete, and those before that it may lean on."""
    known: int = 0
    """How many of `tokens` have their text in `text` already."""
    text: str = ""


class StopStrings:
    """Watches every row for the recipe's stop strings. Text is what reward functions read: special tokens left out."""

    def __init__(self, stop: Sequence[str], tokenizer: Any, rows: int) -> None:
        self.stop = tuple(stop)
        self.tokenizer = tokenizer
        self.longest = max((len(string) for string in stop), default=0)
        self.tails = [_Tail() for _ in range(rows)] if stop else []

    def reached(self, row: int, token: int) -> bool:
        """Whether `row`, longer by `token`, now contains a stop string."""
        if not self.stop:
            return False
        tail = self.tails[row]
        tail.tokens.append(token)
        # A token's text may depend on its left neighbours (spaces, bytes of one character): decode with and without it.
        before, whole = self._decode(tail.tokens[: tail.known]), self._decode(tail.tokens)
        if whole.endswith(UNFINISHED) or len(whole) <= len(before):
            return False
        tail.text = tail.text[-self.longest :] + whole[len(before) :]
        tail.tokens, tail.known = tail.tokens[tail.known :], len(tail.tokens) - tail.known
        return any(string in tail.text for string in self.stop)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
