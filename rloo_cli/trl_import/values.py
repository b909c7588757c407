"""Expressions of a script as values, where their text alone tells them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rloo_cli.trl_import.scope import Script, Unread

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
CONVERTERS: Mapping[str, Callable[..., Any]] = {"str": str, "int": int, "float": float, "bool": bool, "pathlib.Path": str, "list": list}
DTYPES = ("float32", "float16", "bfloat16")
LARGEST = 2**63
"""Of numbers that are computed, and characters of a text: a script cannot make the reading of it expensive."""
LONGEST = 100_000


class Values:
    """Evaluates expressions of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.notes: list[tuple[int, str]] = []
        """(line, what was taken for granted)."""
        self._depth = 0

    def value(self, node: ast.expr) -> Any:
        """The value as plain data.

        Raises:
            Unread: only running the script could tell.
        """
        self._depth += 1
        try:
            if self._depth > 50:
                raise Unread(node, "it goes round in a circle, or too deep")
            return self._value(node)
        finally:
            self._depth -= 1

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
            return node.value
        if isinstance(node, ast.Name):
            return self.value(self.script.value_of(node))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return self._mapping(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -self._number(inner, node)
        if isinstance(node, ast.BinOp):
            return self._computed(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._part(part) for part in node.values)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise Unread(node, f"`{_text(node)}` shows its value only when the script runs")

    def keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """The keyword arguments of a call, those of `**{…}` included.

        Raises:
            Unread: a `**` of something else.
        """
        found: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            spread = self.script.value_of(keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
            if isinstance(spread, ast.Dict) and all(isinstance(key, ast.Constant) for key in spread.keys):
                found |= {
                    str(key.value): value for key, value in zip(spread.keys, spread.values, strict=True) if isinstance(key, ast.Constant)
                }
            elif isinstance(spread, ast.Call) and self.script.dotted(spread.func) == "dict" and not spread.args:
                found |= self.keywords(spread)
            else:
                raise Unread(keyword.value, f"`**{_text(keyword.value)}` shows its names only when the script runs")
        return found

    def _mapping(self, node: ast.Dict) -> dict[str, Any]:
        if any(key is None for key in node.keys):
            raise Unread(node, f"`{_text(node)}` shows its names only when the script runs")
        return {str(self.value(key)): self.value(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}

    def _computed(self, node: ast.BinOp) -> Any:
        left, right, compute = self.value(node.left), self.value(node.right), OPERATORS.get(type(node.op))
        is_text = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if compute is None or not (is_text or all(isinstance(side, int | float) for side in (left, right))):
            raise Unread(node, f"`{_text(node)}` shows its value only when the script runs")
        try:
            result = compute(left, right)
        except ArithmeticError as error:
            raise Unread(node, f"`{_text(node)}`: {error}") from error
        if (isinstance(result, str) and len(result) > LONGEST) or (isinstance(result, int) and abs(result) > LARGEST):
            raise Unread(node, f"`{_text(node)}` is too large")
        return result

    def _number(self, value: Any, node: ast.expr) -> Any:
        if isinstance(value, int | float):
            return value
        raise Unread(node, f"`{_text(node)}` is no number")

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        if isinstance(part, ast.FormattedValue) and part.format_spec is None and part.conversion == -1:
            return str(self.value(part.value))
        raise Unread(part, "a text with a format shows only when the script runs")

    def _attribute(self, node: ast.Attribute) -> Any:
        dotted = self.script.dotted(node)
        if dotted.startswith("torch.") and node.attr in DTYPES:
            return node.attr
        if "TaskType." in dotted:
            return node.attr
        if self.script.is_parsed(node.value):
            if self.script.options.get(node.attr) is None:
                raise Unread(node, f"`{_text(node)}` comes from the command line")
            default = self.script.options[node.attr]
            assert default is not None
            self.notes.append((node.lineno, f"`{_text(node)}` is read as the default of that option, {_text(default)}"))
            return self.value(default)
        raise Unread(node, f"`{_text(node)}` shows its value only when the script runs")

    def _call(self, node: ast.Call) -> Any:
        name = self.script.dotted(node.func)
        if name == "dict" and not node.args:
            return {key: self.value(value) for key, value in self.keywords(node).items()}
        if name == "os.path.join" and node.args:
            return "/".join(str(self.value(argument)) for argument in node.args)
        if name in CONVERTERS and len(node.args) == 1 and not node.keywords:
            inner = self.value(node.args[0])
            try:
                return CONVERTERS[name](inner)
            except (ValueError, TypeError) as error:
                raise Unread(node, f"`{_text(node)}`: {error}") from error
        if name in ("os.environ.get", "os.getenv"):
            raise Unread(node, f"`{_text(node)}` comes from the environment")
        raise Unread(node, f"`{_text(node)}` shows its value only when the script runs")


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


text_of = _text
"""An expression on one line, as messages show it."""
