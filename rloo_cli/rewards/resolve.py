"""Which function a recipe names, and how it can be called, read from source: nothing of the recipe's runs.

What source cannot tell (decorators, objects made at import) is left open here and told by the real import, which a worker does later.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import RecipeError
from rloo_cli.rewards import bindings, given
from rloo_cli.rewards.bindings import Parameters
from rloo_cli.rewards.inputs import ParameterError
from rloo_cli.rewards.modules import ModuleFile, find_module, search_path, submodules
from rloo_cli.rewards.parameters import check_values, is_built_in

BUILT_IN = "rloo_cli.rewards"
OFFERED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""What every reward function may name beside the data set's columns and its own `kwargs`."""
COMPLETIONS = ("completions", "completion_ids", "prompts")
"""What a reward function takes one of at least. Any other installed function, such as `subprocess.getoutput`, is none of a recipe's business."""
MOST_HOPS = 20
"""Re-exports and aliases that are followed before giving up."""
MOST_CANDIDATES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    """A reward function that exists.

    Example: `RewardSource(function="my.score", module="my", name="score", file="/home/me/my.py", line=3,
    parameters=("completions", "answer"), required=("completions", "answer"), takes_any_keyword=True, …)`
    """

    function: str
    """As the recipe names it."""
    module: str
    """The module that is imported."""
    name: str
    """The attribute that is read from it."""
    file: str
    """Where it is defined, re-exports followed."""
    line: int = 1
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Parameters without a default."""
    takes_any_keyword: bool = True
    is_async: bool = False
    has_check_rows: bool = False
    is_signature_known: bool = False
    """False where only the import can tell: decorated functions, objects made by a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The statement or expression that a name comes to, and where."""

    node: ast.AST | None
    """None where source does not tell."""
    module: ModuleFile
    name: str
    line: int
    has_check_rows: bool


def find_reward(function: str, *, code_dir: Path) -> RewardSource:
    """Where a reward function is and what it takes; a name without a dot is a built-in.

    Raises:
        RecipeError: there is no such function in the installed packages or below `code_dir`; the message holds the candidates.
    """
    _check_form(function)
    dotted = function if "." in function else f"{BUILT_IN}.{function}"
    module_name, _, name = dotted.rpartition(".")
    if given.is_given(module_name):
        return _given_source(function, name)
    try:
        return _Search(function, search_path(code_dir), code_dir).source(module_name, name)
    except SyntaxError as error:
        raise RecipeError(f"`{function}`: {error.filename or module_name}:{error.lineno or 1}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"`{function}`: the source of module `{module_name}` cannot be parsed: {error}") from error


def _given_source(function: str, name: str) -> RewardSource:
    place = given.place_of(name)
    if place is None:
        raise RecipeError(
            f"`{function}` is a function that a Python program gave as an object: run that program again, or write the function into a "
            f"module and name it `module.{name}`"
        )
    return RewardSource(function=function, module=given.MODULE, name=name, file=place[0], line=place[1])


def check_arguments(source: RewardSource, *, columns: Collection[str] | None, kwargs: Mapping[str, object]) -> None:
    """Nothing, where the function can be called with the recipe's `kwargs` and the data set's columns (None: not known yet).

    Raises:
        RecipeError: an argument that nothing fills or that the function does not take, or that makes no sense to a built-in.
    """
    reserved = sorted(set(OFFERED) & set(kwargs))
    if reserved:
        raise RecipeError(f"`{source.function}`: kwargs cannot hold `{reserved[0]}`, which every call gets", field=f"kwargs.{reserved[0]}")
    if not source.is_signature_known:
        return
    if not source.takes_any_keyword and set(source.parameters).isdisjoint(COMPLETIONS):
        raise RecipeError(
            f"`{source.function}` ({source.file}:{source.line}) takes no `completions`: it is no reward function. {_takes(source)}"
        )
    # A built-in's **kwargs swallows the columns that it does not read; every parameter that it has is named.
    takes_anything = source.takes_any_keyword and source.module != BUILT_IN
    unknown = [] if takes_anything else sorted(set(kwargs) - set(source.parameters))
    if unknown:
        hint = f"{_did_you_mean(unknown[0], source.parameters)} {_takes(source)}"
        raise RecipeError(f"`{source.function}` takes no `{unknown[0]}`.{hint}", field=f"kwargs.{unknown[0]}")
    if is_built_in(source.module):
        try:
            check_values(source.module, source.name, kwargs)
        except ParameterError as error:
            raise RecipeError(f"`{source.function}`: {error}", field=f"kwargs.{error.parameter}") from error
    missing = [name for name in source.required if columns is not None and name not in {*OFFERED, *columns, *kwargs}]
    if missing:
        raise RecipeError(
            f"`{source.function}` needs `{missing[0]}`, which is no column of the data set (columns: {_listed(sorted(columns or ()))}) "
            f"and not in its kwargs.{_did_you_mean(missing[0], columns or ())}"
        )


class _Search:
    def __init__(self, function: str, path: Sequence[str], code_dir: Path) -> None:
        self.function = function
        self.path = path
        self.code_dir = code_dir

    def source(self, module_name: str, name: str) -> RewardSource:
        module = find_module(module_name, self.path)
        if module is None:
            raise RecipeError(self._no_module(module_name, name))
        if module.source is None:
            raise RecipeError(
                f"`{self.function}`: module `{module_name}` has no Python source; name a Python function of yours that calls it"
            )
        if module_name.partition(".")[0] in sys.stdlib_module_names and not Path(module.file).is_relative_to(self.code_dir.resolve()):
            raise RecipeError(f"`{self.function}`: `{module_name}` belongs to Python itself and holds no reward functions")
        found = self._follow(module, name, MOST_HOPS)
        if found is None:
            raise RecipeError(self._no_name(module, name))
        parameters, is_async = self._call_of(found)
        if parameters is not None and parameters.positional_only:
            raise RecipeError(
                f"`{self.function}` ({found.module.file}:{found.line}): `{parameters.positional_only[0]}` is positional-only; rewards are called by keyword"
            )
        known = parameters or Parameters(takes_any_keyword=True)
        return RewardSource(
            function=self.function,
            module=module_name,
            name=name,
            file=found.module.file,
            line=found.line,
            parameters=known.names,
            required=known.required,
            takes_any_keyword=known.takes_any_keyword,
            is_async=is_async,
            has_check_rows=found.has_check_rows,
            is_signature_known=parameters is not None,
        )

    def _follow(self, module: ModuleFile, name: str, hops: int) -> _Found | None:
        """What the name comes to, aliases and re-exports followed; None where the module does not bind it."""
        tree = _tree(module)
        statement = bindings.find_binding(tree, name)
        if statement is None:
            return self._follow_stars(module, tree, name, hops)
        has_check_rows = bindings.sets_attribute(tree, name, "check_rows")
        here = _Found(node=statement, module=module, name=name, line=statement.lineno, has_check_rows=has_check_rows)
        further: _Found | None = here
        if isinstance(statement, ast.ImportFrom):
            further = self._follow_import(module, statement, name, hops)
        value = bindings.assigned_value(statement)
        if isinstance(value, ast.Name):
            further = self._follow(module, value.id, hops - 1) if hops else None
        if further is None:
            return _Found(node=None, module=module, name=name, line=statement.lineno, has_check_rows=has_check_rows)
        return further

    def _follow_import(self, module: ModuleFile, statement: ast.ImportFrom, name: str, hops: int) -> _Found | None:
        original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        target = find_module(_absolute(module, statement), self.path) if hops else None
        if target is None or target.source is None:
            return None
        return self._follow(target, original, hops - 1)

    def _follow_stars(self, module: ModuleFile, tree: ast.Module, name: str, hops: int) -> _Found | None:
        stars = [s for s in bindings.top_level(tree.body) if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
        for statement in reversed(stars):
            target = find_module(_absolute(module, statement), self.path) if hops and not name.startswith("_") else None
            found = self._follow(target, name, hops - 1) if target is not None and target.source is not None else None
            if found is not None:
                return found
        return None

    def _call_of(self, found: _Found) -> tuple[Parameters | None, bool]:
        """The parameters (None: not known) and whether it is a coroutine function. Raises where it cannot be called."""
        node = found.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return (None if node.decorator_list else bindings.parameters_of(node.args)), isinstance(node, ast.AsyncFunctionDef)
        if isinstance(node, ast.ClassDef):
            self._not_a_function(
                found, f"is a class; name a function, or an instance: `{found.name.lower()} = {found.name}(…)` in the module"
            )
        if isinstance(node, ast.Import):
            self._not_a_function(found, "is a module; name a function in it")
        value = bindings.assigned_value(node) if isinstance(node, ast.stmt) else None
        if isinstance(value, bindings.CONSTANTS):
            self._not_a_function(found, "is a constant, not a function")
        if isinstance(value, ast.Lambda):
            return bindings.parameters_of(value.args), False
        method = _call_method(_tree(found.module), value)
        if method is not None:
            return bindings.parameters_of(method.args, bound=True), isinstance(method, ast.AsyncFunctionDef)
        return None, False

    def _not_a_function(self, found: _Found, what: str) -> None:
        raise RecipeError(f"`{self.function}` ({found.module.file}:{found.line}) {what}.{_candidates(found.module, '')}")

    def _no_name(self, module: ModuleFile, name: str) -> str:
        if find_module(f"{module.name}.{name}", self.path) is not None:
            below = find_module(f"{module.name}.{name}", self.path)
            return f"`{self.function}` is a module; name a function in it.{_candidates(below, name)}"
        if module.name == BUILT_IN:
            return f"there is no built-in reward `{name}`.{_candidates(module, name)} A function of yours is named `module.function`."
        return f"`{self.function}`: module `{module.name}` ({module.file}) has no `{name}`.{_candidates(module, name)}"

    def _no_module(self, module_name: str, name: str) -> str:
        parent_name, _, last = module_name.rpartition(".")
        parent = find_module(parent_name, self.path) if parent_name else None
        if parent is not None and parent.search is None:
            return f"`{self.function}`: `{parent_name}` is a module, not a package; name a function at the top level of a module.{_candidates(parent, last)}"
        if parent is not None:
            return (
                f"`{self.function}`: package `{parent_name}` has no module `{last}`.{_did_you_mean(last, submodules(parent.search or ()))}"
            )
        where = f"`{self.function}`: no module `{module_name}` among the installed packages or below the folder `{self.code_dir}` (--code-dir names another)."
        top = module_name.split(".")[0]
        if find_module(top, [str(Path.cwd())]) is not None and find_module(top, self.path) is None:
            return f"{where} One is in the working directory, which is not searched: add `--code-dir {Path.cwd()}`."
        built_in = find_module(BUILT_IN, self.path)
        if built_in is not None and name in _public(built_in):
            return f"{where} Did you mean the built-in `{name}`?"
        return where + _did_you_mean(top, submodules([str(self.code_dir)]))


def _check_form(function: str) -> None:
    if "/" in function or "\\" in function or ":" in function or function.endswith(".py"):
        raise RecipeError(
            f"`{function}` looks like a file; write a dotted path such as `my_rewards.score` for function `score` of my_rewards.py in the recipe's folder"
        )
    if not all(part.isidentifier() for part in function.split(".")):
        raise RecipeError(f"`{function}` is not a dotted path of Python names, such as `my_rewards.score`")


def _tree(module: ModuleFile) -> ast.Module:
    return ast.parse(module.source or "", filename=module.file)


def _absolute(module: ModuleFile, statement: ast.ImportFrom) -> str:
    """The full name of the module that a `from … import` statement names."""
    if statement.level == 0:
        return statement.module or ""
    parts = module.name.split(".")
    package = parts[: len(parts) - statement.level + (module.search is not None)]
    return ".".join([*package, *([statement.module] if statement.module else [])])


def _call_method(tree: ast.Module, value: ast.expr | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """`__call__` of the class that `value` makes an instance of, where the class is written in the same module."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    made = bindings.find_binding(tree, value.func.id)
    if not isinstance(made, ast.ClassDef):
        return None
    methods = [
        s for s in made.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) and s.name == "__call__" and not s.decorator_list
    ]
    return methods[-1] if methods else None


def _public(module: ModuleFile) -> list[str]:
    return bindings.public_callables(_tree(module), with_imports=module.search is not None)


def _candidates(module: ModuleFile | None, name: str) -> str:
    names = _public(module) if module is not None and module.source else []
    if not names:
        return " It has no public functions." if module is not None else ""
    return f"{_did_you_mean(name, names)} Its public functions: {_listed(names)}."


def _did_you_mean(name: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def _takes(source: RewardSource) -> str:
    return f"Its parameters: {_listed(source.parameters)}."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_CANDIDATES])
    return f"{shown}, … ({len(names)} in all)" if len(names) > MOST_CANDIDATES else shown or "none"
