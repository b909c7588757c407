"""docs/troubleshooting.md quotes messages; each has to be in the source as it is quoted."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rloo_cli import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTE = re.compile(r"`([^`]+)`")
ANY = "…"


def cells() -> list[str]:
    """The first cell of every row of the page's tables."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| message", "| ---"))]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


def quotes() -> list[str]:
    return [quote for cell in cells() for quote in QUOTE.findall(cell)]


@cache
def sources() -> tuple[str, ...]:
    """Every text in the package, `…` where a value is put in; what only explains the code is left out."""
    found = []
    for path in (ROOT / "rloo_cli").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in said:
                continue
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_in_the_source(quote):
    parts = [re.escape(part) for part in quote.split(ANY)]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in sources())
    assert max(len(part) for part in quote.split(ANY)) > 10, "too short to mean one message"


def test_every_row_quotes_a_message():
    assert [cell for cell in cells() if not QUOTE.search(cell)] == []


def test_every_exit_code_has_its_part():
    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RlooError)}
    headings = " ".join(line for line in PAGE.splitlines() if line.startswith("## "))
    assert {str(code) for code in codes} <= set(re.findall(r"\d+", headings))
