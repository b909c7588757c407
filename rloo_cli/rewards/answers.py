"""Where the answer stands in a text, and what kind of answer a gold string is. Pure string work, linear in its length."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

WINDOW = 8192
"""Characters of a text that are parsed: enough for an answer, too few for the quadratic patterns of the parser."""

LONGEST_TEXT_ANSWER = 100
"""Characters of a gold answer in words; a longer one without a mark of its answer is a whole solution."""

_DELIMITED = re.compile(r"\\boxed|\\fbox|\\\(|\\\[|\$[^$]+\$")
_ARITHMETIC = re.compile(r"[-+$€£]*\s*[\d.][\d.\s+\-*/^()%×÷]*")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,.;:!?'’\-]+[^\W\d_]+)*[\s.!?]*")
_ANSWER_MARK = re.compile(r"answer\s*(?:is|:)+\s*", re.IGNORECASE)
_MATHEMATICAL_WORDS = {"pi", "infinity", "inf"}
_PROSE_WORDS = 3

# Plain LaTeX, reduced from the inside out: § stands for a power (which takes no second exponent), 1 for any other part.
_ATOM = r"(?:\d{1,15}(?:\.\d{1,15})?|\\pi(?![a-zA-Z])|(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])|§)"
_SUM = rf"-?\s*{_ATOM}(?:\s*[-+]?\s*{_ATOM}){{0,7}}"
_PLAIN_PARTS = (
    (re.compile(rf"\\[dt]?frac\{{{_SUM}\}}\{{{_SUM}\}}"), "1"),
    (re.compile(rf"\\sqrt\{{{_SUM}\}}"), "1"),
    (re.compile(rf"\\(?:ln|sin|cos|tan)\s*\({_SUM}\)|\\(?:ln|sin|cos|tan)\s+\d+(?!\^)"), "1"),
    (re.compile(rf"(?:\({_SUM}\)|(?!§){_ATOM})\^(?:\{{{_SUM}\}}|\d|[a-zA-Z](?![a-zA-Z]))"), "§"),
    (re.compile(rf"\({_SUM}\)(?!\^)"), "1"),
)
_PLAIN = re.compile(_SUM)
_LONGEST_PLAIN = 60


@dataclass(frozen=True, slots=True)
class GoldForms:
    """How a gold answer is read.

    Example: `2\\pi` → `GoldForms(math=("$2\\pi$", "2\\pi"), text=None)`; `Yes` → `GoldForms(math=("$Yes$",), text="yes")`
    """

    math: tuple[str, ...]
    """Strings to be parsed as mathematics, the first that parses counts; empty for words alone."""
    text: str | None
    """The normalised words to compare with; None where the answer is mathematics."""


def read_gold(gold: str) -> GoldForms:
    """The forms in which a gold answer is tried: as it stands where it marks its mathematics or is arithmetic, else inside $…$."""
    gold = window(gold.rpartition("####")[2].strip())
    if scientific := _SCIENTIFIC.fullmatch(gold):
        return GoldForms(math=(rf"${scientific[1]} \times 10^{{{int(scientific[2])}}}$",), text=None)
    if _DELIMITED.search(gold) or _ARITHMETIC.fullmatch(gold):
        return GoldForms(math=(gold, f"${gold}$"), text=None)
    words = normalise_text(gold)
    if _WORDS.fullmatch(words) and len(words) > 1 and words not in _MATHEMATICAL_WORDS and len(gold) <= LONGEST_TEXT_ANSWER:
        return GoldForms(math=(f"${gold}$",) if len(words) <= _PROSE_WORDS else (), text=words)
    if _is_prose(gold):
        return GoldForms(math=(gold,), text=None)
    return GoldForms(math=(f"${gold}$", gold), text=None)


def surely_parses(gold: str) -> bool:
    """Whether a gold answer is so plain that it need not be parsed (milliseconds) to know that it can be (microseconds)."""
    if len(gold) > _LONGEST_PLAIN:
        return False
    before = ""
    while gold != before:
        before = gold
        for part, stand_in in _PLAIN_PARTS:
            gold = part.sub(stand_in, gold)
    return _PLAIN.fullmatch(gold) is not None or gold in ("\\infty", "-\\infty")


def is_balanced(text: str) -> bool:
    """Whether every { of a LaTeX string has its }."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def normalise_text(text: str) -> str:
    """Words ready to be compared: \\text{…} unwrapped, case, spacing, and punctuation at the ends gone."""
    text = _TEXT_COMMAND.sub(r"\1", text).replace("$", "").replace("\\ ", " ").replace("~", " ")
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(" .,;:!?\"'`*()")


def final_answer(text: str) -> str | None:
    """The last boxed content, or else what follows the last "answer is" or "answer:" on its line; None without either."""
    text = window(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    marks = list(_ANSWER_MARK.finditer(text))
    return text[marks[-1].end() :].split("\n", 1)[0] if marks else None


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}`; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[begin : begin + brace.start()]
    return None


def window(text: str) -> str:
    """At most WINDOW characters: around the last \\boxed of a longer text, or its end."""
    if len(text) <= WINDOW:
        return text
    start = min(len(text) - WINDOW, max(0, text.rfind("\\boxed") - WINDOW // 8)) if "\\boxed" in text else len(text) - WINDOW
    return text[start : start + WINDOW]


def _is_prose(text: str) -> bool:
    return len(re.findall(r"(?<![\\\w])[^\W\d_]{2,}", text)) >= _PROSE_WORDS and any(map(str.isdigit, text))
