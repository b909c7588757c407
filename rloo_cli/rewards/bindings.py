"""What a module's top level binds to a name, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

CONSTANTS = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple, ast.JoinedStr, ast.ListComp, ast.SetComp, ast.DictComp, ast.UnaryOp)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How a function can be called by keyword.

    Example: `def f(completions, answer, scale=1.0, **kwargs)` gives
    `Parameters(names=("completions", "answer", "scale"), required=("completions", "answer"), takes_any_keyword=True)`
    """

    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Those without a default."""
    takes_any_keyword: bool = False
    positional_only: tuple[str, ...] = ()
    """Those without a default that no keyword can fill: such a function cannot be called."""


def find_binding(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last statement of the module's top level, branches included, that binds the name."""
    found = None
    for statement in top_level(tree.body):
        if name in bound_names(statement):
            found = statement
    return found


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module does, those inside if, try, with and loops included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for field in BODIES:
            for child in getattr(statement, field, []):
                if isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from top_level(child.body)
                elif isinstance(child, ast.stmt):
                    yield from top_level([child])


def bound_names(statement: ast.stmt) -> list[str]:
    """The names that this one statement binds, without those of its inner statements."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return []
    nodes = [node for target in targets if target is not None for node in ast.walk(target)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def assigned_value(statement: ast.stmt) -> ast.expr | None:
    """The value of `name = value`; None for every other statement, unpacking included."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value
    if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
        return statement.value
    return None


def parameters_of(arguments: ast.arguments, *, bound: bool = False) -> Parameters:
    """The parameters of a function; of a `bound` method without its first."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = {argument.arg for argument in positional[len(positional) - len(arguments.defaults) :]}
    with_default |= {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is not None}
    skipped = {argument.arg for argument in positional[:1]} if bound else set()
    names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg not in skipped]
    return Parameters(
        names=tuple(names),
        required=tuple(name for name in names if name not in with_default),
        takes_any_keyword=arguments.kwarg is not None,
        positional_only=tuple(a.arg for a in arguments.posonlyargs if a.arg not in skipped | with_default),
    )


def public_callables(tree: ast.Module, *, with_imports: bool = False) -> list[str]:
    """The public functions of the module, in order of appearance; `with_imports`: those of other modules as well, as in a package."""
    found: dict[str, None] = {}
    for statement in top_level(tree.body):
        if isinstance(statement, ast.ImportFrom):
            names = [name for name in bound_names(statement) if with_imports and statement.module != "__future__" and name.islower()]
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [statement.name]
        else:
            value = assigned_value(statement)
            is_instance = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id[:1].isupper()
            names = bound_names(statement) if is_instance or isinstance(value, ast.Lambda) else []
        found.update(dict.fromkeys(name for name in names if not name.startswith("_") and name != "*"))
    return list(found)


def sets_attribute(tree: ast.Module, name: str, attribute: str) -> bool:
    """Whether the module's top level assigns `name.attribute`."""
    return any(
        isinstance(target, ast.Attribute) and target.attr == attribute and isinstance(target.value, ast.Name) and target.value.id == name
        for statement in top_level(tree.body)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    )
