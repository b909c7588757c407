"""Where a module's source lies, found without running any: no parent package is imported on the way.

`importlib.util.find_spec("a.b")` imports `a`; here each package's folder is asked for the next part instead.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from pathlib import Path
from typing import Any

import rloo_cli

PACKAGE_ROOT = str(Path(rloo_cli.__file__).resolve().parent.parent)
"""The folder that holds rloo_cli itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFile:
    """A module that exists.

    Example: `ModuleFile(name="my.rewards", file="/home/me/my/rewards.py", source="def score(): …", search=None)`
    """

    name: str
    file: str
    """Path of its source; `built-in`, or the folder of a package without `__init__.py`."""
    source: str | None
    """None where there is none to read: an extension module, a lone .pyc."""
    search: tuple[str, ...] | None
    """Folders of its submodules; None where it is no package."""


def search_path(code_dir: Path | None) -> list[str]:
    """The folders that reward functions are imported from: `code_dir`, if there is one, then what is installed.

    The working directory is left out unless it is one of those, or PYTHONPATH names it.
    """
    named = {os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    here = os.path.realpath(Path.cwd())
    installed = [entry for entry in sys.path if entry and (os.path.realpath(entry) != here or here in named)]
    own = [str(code_dir.resolve())] if code_dir is not None else []
    return list(dict.fromkeys([*own, *installed, PACKAGE_ROOT]))


def find_module(name: str, path: Sequence[str]) -> ModuleFile | None:
    """The module of this dotted name, or None; `path` is where its first part is looked for."""
    importlib.invalidate_caches()
    parts = name.split(".")
    search: Sequence[str] | None = [PACKAGE_ROOT] if parts[0] == "rloo_cli" else path
    spec = None
    for i in range(len(parts)):
        if search is None:
            return None
        full_name = ".".join(parts[: i + 1])
        spec = _find_below(full_name, search) or (_find_elsewhere(full_name) if i == 0 else None)
        if spec is None:
            return None
        search = spec.submodule_search_locations
    return _module_file(spec) if spec is not None else None


def submodules(path: Iterable[str]) -> list[str]:
    """The names of all modules in these folders."""
    return sorted({module.name for module in pkgutil.iter_modules(list(path))})


def _find_below(full_name: str, search: Sequence[str]) -> ModuleSpec | None:
    portions: list[str] = []
    for entry in search:
        finder = pkgutil.get_importer(entry)
        spec = finder.find_spec(full_name) if finder is not None else None
        if spec is None:
            continue
        if spec.loader is not None:
            return spec
        portions += spec.submodule_search_locations or []  # part of a package without __init__.py
    if not portions:
        return None
    spec = ModuleSpec(full_name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec


def _find_elsewhere(name: str) -> ModuleSpec | None:
    """Modules of the interpreter, and packages installed in editable mode by an import hook."""
    hooks = [finder for finder in sys.meta_path if "editable" in getattr(finder, "__module__", "")]
    finders: list[Any] = [BuiltinImporter, FrozenImporter, *hooks]
    for finder in finders:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _module_file(spec: ModuleSpec) -> ModuleFile:
    locations = spec.submodule_search_locations
    search = tuple(locations) if locations is not None else None
    if spec.loader is None:
        return ModuleFile(name=spec.name, file=search[0] if search else "", source="", search=search)
    read = getattr(spec.loader, "get_source", None)
    try:
        source = read(spec.name) if read is not None else None
    except ImportError as error:  # the file is not text in the encoding that it declares
        raise SyntaxError(str(error)) from error
    return ModuleFile(name=spec.name, file=spec.origin or "built-in", source=source, search=search)
