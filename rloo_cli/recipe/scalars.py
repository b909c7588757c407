"""What a written value means: `no`, `1e-6`, `010`, `.nan`, and free-form data.

YAML 1.1 and 1.2 disagree about many texts; here the field decides (`fields.py`), with the help of these functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rloo_cli.recipe.nodes import Broken, Fields, Items, Node, Place, Scalar, printable

TRUE_WORDS = frozenset(word for base in ("true", "yes", "on") for word in (base, base.capitalize(), base.upper()))
FALSE_WORDS = frozenset(word for base in ("false", "no", "off") for word in (base, base.capitalize(), base.upper()))
NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})
_WHOLE = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_OCTAL_LOOKING = re.compile(r"[-+]?0[0-9_]+")
_DECIMAL = re.compile(r"[-+]?([0-9](_?[0-9])*\.?([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][-+]?[0-9]{1,6})?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|infinity|nan)", re.IGNORECASE)
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
MAX_WHOLE = 2**63 - 1


def is_null(node: Node) -> bool:
    """Whether the node is an empty value, `null` or `~`."""
    return isinstance(node, Scalar) and node.is_plain and node.text in NULL_WORDS


def number_in(text: str) -> int | float | str | None:
    """The number that an unquoted text stands for; a str is the reason why it may not be one; None = not a number at all.

    `1e-6` is a number here (a string in YAML 1.1); `010` is refused, since YAML 1.1 reads 8 and YAML 1.2 reads 10.
    """
    if len(text) <= 400:  # longer than any number somebody means; int() of a long text takes quadratic time
        if _WHOLE.fullmatch(text):
            whole = int(text.replace("_", ""))
            return whole if abs(whole) <= MAX_WHOLE else "too large for a whole number (64 bits)"
        if _OCTAL_LOOKING.fullmatch(text):
            return f"`{printable(text)}` is ambiguous (octal to some readers); write it without the leading zero"
        if _DECIMAL.fullmatch(text):
            decimal = float(text.replace("_", ""))
            return decimal if abs(decimal) != float("inf") else "infinities are refused"
    return "NaN and infinities are refused" if _NOT_FINITE.fullmatch(text) else None


def plain_data(node: Node, fail: Callable[[Place, str], None]) -> Any:
    """A free-form value (an argument of a reward function, of a chat template) as Python data; `fail` is told what is refused.

    Unquoted words mean what PyYAML makes of them (`no` is False), but that `1e-6` is a number and dates stay text.
    """
    if isinstance(node, Items):
        return [plain_data(item, fail) for item in node.items]
    if isinstance(node, Fields):
        return {key: plain_data(pair.node, fail) for key, pair in node.pairs.items()}
    if isinstance(node, Broken):
        return None
    return _scalar_data(node, fail)


def _scalar_data(node: Scalar, fail: Callable[[Place, str], None]) -> Any:
    text = node.text
    if not node.is_plain:
        return text
    if text in NULL_WORDS:
        return None
    if text in TRUE_WORDS or text in FALSE_WORDS:
        return text in TRUE_WORDS
    number = number_in(text)
    if isinstance(number, str):
        if _NOT_FINITE.fullmatch(text) and not _YAML_NOT_FINITE.fullmatch(text):
            return text  # the words "nan" and "inf" are text in YAML; only .nan and .inf are numbers
        fail(node.place, f"{number}.")
        return None
    return text if number is None else number


def reads_as_text(text: str) -> bool:
    """Whether the text, written without quotes in a free-form place, would be read back as this very text."""
    refused: list[str] = []
    value = _scalar_data(Scalar(Place(""), text, True), lambda _, message: refused.append(message))
    return not refused and isinstance(value, str)
