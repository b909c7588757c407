"""A script's syntax tree, and what its names stand for where they are used. Nothing of the script runs."""

from __future__ import annotations

import ast
import io
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.errors import RecipeError

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Match)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PARSERS = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args")
LARGEST_SCRIPT = 1 << 20
"""Bytes; more than any program that a person wrote."""
TOO_DEEP = "its expressions are nested too deeply to be read"


class Unread(Exception):
    """An expression whose value only running the script could tell."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.line = getattr(node, "lineno", 0)
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One statement that gives a name a value."""

    line: int
    end: int
    """The statement's last line."""
    value: ast.expr | None
    """None where it is unpacked from something, or counted through."""
    is_certain: bool
    """Whether it stands outside of every branch and loop."""


@dataclass(slots=True)
class Script:
    """What there is to look up."""

    path: Path
    source: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """Local name → dotted name."""
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    """Name → the statements that bind it, at the top level and inside functions, in the order of lines."""
    functions: dict[str, ast.stmt] = field(default_factory=dict)
    """Functions and classes of the top level."""
    inner: dict[str, ast.stmt] = field(default_factory=dict)
    """Functions inside functions."""
    options: dict[str, ast.expr | None] = field(default_factory=dict)
    """Defaults of command line options: of `add_argument`, and of dataclasses' fields."""

    @classmethod
    def read(cls, path: Path) -> Script:
        """The script in a file.

        Raises:
            RecipeError: it cannot be read, or is no Python.
        """
        try:
            source = _source(path)
            tree = ast.parse(source, str(path))
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}.") from error
        except SyntaxError as error:
            raise RecipeError(f"{path}:{error.lineno or 1}: {error.msg}.") from error
        except (RecursionError, MemoryError) as error:
            raise RecipeError(f"{path}: {TOO_DEEP}.") from error
        except ValueError as error:
            raise RecipeError(f"{path}: no Python source: {error}.") from error
        script = cls(path, source, tree)
        script._note(tree.body, is_certain=True, is_top=True)
        script._note_options()
        for found in script.bindings.values():
            found.sort(key=lambda binding: binding.line)
        return script

    def dotted(self, node: ast.expr) -> str:
        """The dotted name that an expression is, imports followed; empty where it is none. `RLOOConfig` → `trl.RLOOConfig`."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def calls(self, name: str) -> list[ast.Call]:
        """Every call of what has this last name."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.dotted(node.func).split(".")[-1] == name]
        return sorted(nodes, key=lambda node: node.lineno)

    def value_of(self, name: ast.Name) -> ast.expr:
        """The expression that a name was last given before the place where it is used.

        Raises:
            Unread: it hangs on a branch or loop, or is given by no assignment.
        """
        before = [binding for binding in self.bindings.get(name.id, []) if binding.end < name.lineno]
        if not before:
            raise Unread(name, f"`{name.id}` is not assigned above")
        last = before[-1]
        if last.value is None or not last.is_certain:
            raise Unread(name, f"what `{name.id}` is on line {last.line} shows only when the script runs")
        return last.value

    def is_parsed(self, name: ast.expr) -> bool:
        """Whether a name holds what a parser of the command line gave."""
        if not isinstance(name, ast.Name):
            return False
        return any(
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr in PARSERS
            and any(isinstance(part, ast.Name) and part.id == name.id for target in node.targets for part in ast.walk(target))
            for node in ast.walk(self.tree)
        )

    def _note(self, body: list[ast.stmt], *, is_certain: bool, is_top: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._note_import(statement)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                (self.functions if is_top else self.inner)[statement.name] = statement
                self._note(statement.body, is_certain=is_certain, is_top=False)
            elif isinstance(statement, ast.ClassDef):
                (self.functions if is_top else self.inner)[statement.name] = statement
            elif isinstance(statement, BRANCHES):
                is_main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
                for part in _bodies(statement):
                    self._note(part, is_certain=is_certain and is_main, is_top=is_top)
            for name, value in _bound(statement):
                end = statement.lineno if isinstance(statement, DEFINITIONS) else statement.end_lineno or statement.lineno
                self.bindings.setdefault(name, []).append(Binding(line=statement.lineno, end=end, value=value, is_certain=is_certain))

    def _note_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                self.imports[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
            else:
                self.imports[alias.asname or alias.name] = f"{'.' * statement.level}{statement.module or ''}.{alias.name}"

    def _note_options(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument" and node.args:
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                longest = max((str(name) for name in names), key=len, default="")
                dest = keywords.get("dest")
                name = str(dest.value) if isinstance(dest, ast.Constant) else longest.lstrip("-").replace("-", "_")
                self.options[name] = keywords.get("default")
            elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
                self.options |= {
                    part.target.id: _default_of(part.value)
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }


def _default_of(value: ast.expr | None) -> ast.expr | None:
    """The default that a dataclass' field has: the value itself, or `field(default=…)`."""
    if isinstance(value, ast.Call):
        return next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return value


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) of every name that an assignment, a loop or a parameter's default binds."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple | ast.List):
                yield from ((part.id, None) for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        yield statement.target.id, statement.value
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, None
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        with_default = statement.args.args[len(statement.args.args) - len(statement.args.defaults) :]
        yield from ((argument.arg, default) for argument, default in zip(with_default, statement.args.defaults, strict=True))
    elif isinstance(statement, ast.For | ast.AsyncFor):
        yield from ((part.id, None) for part in ast.walk(statement.target) if isinstance(part, ast.Name))


def _source(path: Path) -> str:
    """The text of a script, in the encoding that its first lines declare: UTF-8 without a word, as Python has it.

    Raises:
        OSError: it cannot be read.
        RecipeError: it is no regular file, which might never end, or too large.
        SyntaxError, UnicodeDecodeError: it is not in that encoding.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a folder, opening it tells
        raise RecipeError(f"{path}: is not a regular file; a script is one.")
    with path.open("rb") as file:
        data = file.read(LARGEST_SCRIPT + 1)
    if len(data) > LARGEST_SCRIPT:
        raise RecipeError(f"{path}: is larger than 1 MiB; a script that trains is a short file.")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return io.TextIOWrapper(io.BytesIO(data), encoding).read()
