"""Whether the recipe's `kwargs` of a built-in reward make sense, told before any data is read."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from rloo_cli.rewards.given import is_given
from rloo_cli.rewards.inputs import ParameterError

PACKAGE = "rloo_cli.rewards"


def is_built_in(module: str) -> bool:
    """Whether a module is ours, so that it may be imported before the recipe's own code may."""
    return module == PACKAGE or (module.startswith(f"{PACKAGE}.") and not is_given(module))


def check_values(module: str, name: str, kwargs: Mapping[str, object]) -> None:
    """Nothing, where a built-in can be called with these values: of the annotated types, and what its own `check_values` wants.

    Raises:
        ParameterError: a value is of another type, or makes no sense.
    """
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:  # a missing extra: whoever imports it in earnest says so
        return
    hints = typing.get_type_hints(function)
    for parameter, value in kwargs.items():
        if parameter in hints:
            _check_type(parameter, value, hints[parameter])
    check = getattr(function, "check_values", None)
    if check is not None and _fits(check, kwargs):
        check(**kwargs)


def _check_type(parameter: str, value: object, hint: typing.Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ParameterError(parameter, f"{message[:1].lower()}{message[1:]}, got {value!r:.80}") from error


def _fits(check: typing.Callable[..., object], kwargs: Mapping[str, object]) -> bool:
    """Whether nothing that it needs is missing, which is another error."""
    try:
        inspect.signature(check).bind(**kwargs)
    except TypeError:
        return False
    return True
