"""Calling a reward function and judging what it returns. The only place, with the worker's edge, that answers any exception.

Runs in a worker, and in the trainer for `run_in: trainer`. Results are plain dictionaries, ready for JSON:
`{"values": [1.0, None], "bad": {"1": "returned nan"}, …}` or `{"error": "ValueError: boom (my.py:3)", "retry": True, "traceback": "…"}`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.errors import InterruptedTwiceError
from rloo_cli.rewards.bindings import Parameters
from rloo_cli.types import LARGEST_REWARD, TrainerState

MOST_TRACEBACK = 65536
"""Characters; of a longer one, which only a hostile message makes, the beginning and the end are kept."""
MOST_REPR = 80
MOST_BITS = 1024
"""Of an integer given to log_extra; Python does not even print those of more than 4,300 digits."""
MOST_LINE = 300
METRIC_NAME = re.compile(r"[\w.@/-]{1,100}")
"""What `log_metric` takes for a name: it becomes part of a key in metrics.jsonl and in trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A reward function, imported."""

    function: Callable[..., Any]
    parameters: Parameters
    is_async: bool
    kwargs: Mapping[str, Any]
    timeout: float
    """Seconds an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRows:
    """The rows of one call, each a completion with its prompt; all sequences have the same length."""

    prompts: Sequence[Any]
    completions: Sequence[str]
    is_chat: Sequence[bool]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]


class ReturnedWrong(Exception):
    """What came back is no list of one reward a completion."""


class LogExtraError(ValueError):
    """`log_extra` got no list of one value a completion. Not tried again: for a single completion the same call could be right."""


class LogMetricError(ValueError):
    """`log_metric` got a name that is no word."""


@dataclass(slots=True)
class CallLog:
    """What one call gives to `log_metric` and `log_extra`."""

    count: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    notices: dict[str, str] = field(default_factory=dict)
    """What was left out, by what it is about: the user is told once of each."""

    def log_metric(self, name: str, value: float) -> None:
        """Note a number; what is not finite or too large to be summed is left out, with a notice.

        Raises:
            TypeError: the value is no number.
            LogMetricError: the name is not a word as METRIC_NAME has it.
        """
        name = str(name)
        if not METRIC_NAME.fullmatch(name):
            raise LogMetricError(f"log_metric({safe_repr(_storable(name))}, …): a name is 1 to 100 letters, digits, or any of _ - . / @")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"log_metric({name!r}, …): {safe_repr(value)} is not a number") from error
        if abs(number) <= LARGEST_REWARD:
            self.metrics.setdefault(name, []).append(number)
        else:
            why = f"beyond {LARGEST_REWARD:g}" if math.isfinite(number) else "not a finite number"
            self.notices.setdefault(name, f"log_metric({name!r}, {number}) is left out: {why}")

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a value for each completion. Raises ValueError for anything but a list of as many."""
        if not isinstance(values, list | tuple) and hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise LogExtraError(f"log_extra({column!r}, …): {safe_repr(values)} is not a list of {self.count} values, one a completion")
        if len(values) != self.count:
            raise LogExtraError(f"log_extra({column!r}, …): {len(values)} values for {self.count} completions")
        self.extras[_storable(column)] = [_plain(value) for value in values]


def load_reward(module: str, name: str, kwargs: Mapping[str, Any], timeout: float) -> LoadedReward:
    """The reward function, its module imported: this runs the module. Raises whatever that raises, TypeError for what cannot be called."""
    function = getattr(importlib.import_module(module), name)
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{module}.{name} is {safe_repr(function)}, not a function")
    parameters = inspect_parameters(function)
    if parameters.positional_only:
        raise TypeError(f"`{parameters.positional_only[0]}` is positional-only; rewards are called by keyword")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return LoadedReward(function=function, parameters=parameters, is_async=is_async, kwargs=kwargs, timeout=timeout)


def load_or_fail(entry: Mapping[str, Any]) -> LoadedReward | dict[str, Any]:
    """The reward function of `{"module", "name", "kwargs", "timeout"}`, or how its import failed."""
    try:
        return load_reward(entry["module"], entry["name"], entry["kwargs"], entry["timeout"])
    except (KeyboardInterrupt, InterruptedTwiceError):
        raise
    except BaseException as error:  # user code
        return failure(error)


def inspect_parameters(function: Callable[..., Any]) -> Parameters:
    """How an imported function can be called; one that does not tell is taken to accept everything."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return Parameters(takes_any_keyword=True)
    by_keyword = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        names=tuple(p.name for p in by_keyword),
        required=tuple(p.name for p in by_keyword if p.default is p.empty),
        takes_any_keyword=any(p.kind is p.VAR_KEYWORD for p in found),
        positional_only=tuple(p.name for p in found if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
    )


def call(
    reward: LoadedReward, rows: CallRows, state: TrainerState, *, seed: int | None, loop: asyncio.AbstractEventLoop | None = None
) -> dict[str, Any]:
    """The result of one call, whatever the function does short of ending its process. `seed` None: the generators go on as they are."""
    log = CallLog(len(rows.completions))
    try:
        if seed is not None:
            seed_everything(seed)
        returned = reward.function(**arguments(reward, rows, state, log))
        if inspect.isawaitable(returned):
            returned = _run(_awaited(returned), loop)
        return judge(returned, log)
    except (KeyboardInterrupt, InterruptedTwiceError):  # in the trainer: the user's; in a worker: see its edge
        raise
    except BaseException as error:  # user code: sys.exit is a failure like any other
        return failure(error)


async def call_async(reward: LoadedReward, rows: CallRows, state: TrainerState, *, seed: int) -> dict[str, Any]:
    """As `call`, for a coroutine function that runs beside others; late after timeout × items."""
    log = CallLog(len(rows.completions))
    limit = reward.timeout * log.count
    scope = asyncio.timeout(limit)
    try:
        seed_everything(seed)
        async with scope:
            returned = await reward.function(**arguments(reward, rows, state, log))
        return judge(returned, log)
    except BaseException as error:  # as above
        if scope.expired():
            return {"error": late(limit), "retry": True, "traceback": ""}
        return failure(error)


def late(limit: float) -> str:
    """The line for a call that took too long; seconds."""
    return f"no answer within {limit:g} s"


async def _awaited(value: Any) -> Any:
    return await value


def _run(coroutine: Any, loop: asyncio.AbstractEventLoop | None) -> Any:
    if loop is not None:
        return loop.run_until_complete(coroutine)
    return asyncio.run(coroutine)


def arguments(reward: LoadedReward, rows: CallRows, state: TrainerState, log: CallLog) -> dict[str, Any]:
    """The keyword arguments of a call: columns, then the recipe's kwargs, then what every call offers; copies that a function may change."""
    wanted = reward.parameters
    offered: dict[str, Any] = {**rows.columns, **reward.kwargs}
    offered |= {"prompts": rows.prompts, "completions": _as_content(rows), "completion_ids": rows.completion_ids}
    chosen = {name: copied(value) for name, value in offered.items() if wanted.takes_any_keyword or name in wanted.names}
    tools = {"trainer_state": state, "log_metric": log.log_metric, "log_extra": log.log_extra}
    return chosen | {name: tool for name, tool in tools.items() if wanted.takes_any_keyword or name in wanted.names}


def _as_content(rows: CallRows) -> list[Any]:
    return [[{"role": "assistant", "content": text}] if chat else text for text, chat in zip(rows.completions, rows.is_chat, strict=True)]


def copied(value: Any) -> Any:
    """A copy of nested lists and dictionaries; their leaves are shared."""
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return value


def judge(returned: Any, log: CallLog) -> dict[str, Any]:
    """The result of a call that returned: floats and None, and a line for each value that is neither."""
    try:
        listed = _listed(returned, log.count)
    except ReturnedWrong as error:
        return {"error": str(error), "retry": False, "traceback": ""}
    numbers_ = [_number(value) for value in listed]
    bad = {str(i): number for i, number in enumerate(numbers_) if isinstance(number, str)}
    values = [None if isinstance(number, str) else number for number in numbers_]
    return {"values": values, "bad": bad, "metrics": log.metrics, "extras": log.extras, "notices": log.notices}


def _listed(returned: Any, count: int) -> list[Any]:
    if not isinstance(returned, list | tuple) and hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise ReturnedWrong(f"returned {safe_repr(returned)}, not a list with one float or None for each of the {count} completions")
    if len(returned) != count:
        raise ReturnedWrong(f"returned {len(returned)} rewards for {count} completions: {safe_repr(returned)}")
    return list(returned)


def _number(value: Any) -> float | str | None:
    """The value as a float, None for None, or a line that says what is wrong with it."""
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = ": write float(…)" if isinstance(value, bool) else ""
        return f"returned {safe_repr(value)} ({type(value).__name__}), not a float or None{hint}"
    try:
        number = float(value)
    except OverflowError:
        return f"returned a number beyond the range of a float ({type(value).__name__})"
    return number if math.isfinite(number) else f"returned {number}, not a finite float or None"


def failure(error: BaseException) -> dict[str, Any]:
    """The result of a call that raised."""
    return {"error": error_line(error), "retry": not isinstance(error, LogExtraError | LogMetricError), "traceback": traceback_text(error)}


def error_line(error: BaseException) -> str:
    """`ValueError: boom (my_rewards.py:3)`: kind, first line of the message, innermost place."""
    try:
        message = (str(error).splitlines() or [""])[0][:MOST_LINE]
    except (KeyboardInterrupt, InterruptedTwiceError):
        raise
    except BaseException:  # a hostile __str__
        message = "(its message cannot be shown)"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {message}"
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def traceback_text(error: BaseException) -> str:
    """The traceback, complete unless it is longer than MOST_TRACEBACK."""
    try:
        text = "".join(traceback.format_exception(error))
    except (KeyboardInterrupt, InterruptedTwiceError):
        raise
    except BaseException:  # a hostile __str__
        return "".join(traceback.format_tb(error.__traceback__))
    if len(text) <= MOST_TRACEBACK:
        return text
    half = MOST_TRACEBACK // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def safe_repr(value: Any) -> str:
    """A short repr, whatever the object does."""
    try:
        text = repr(value[:MOST_REPR] if isinstance(value, list | tuple | str) else value)
    except Exception:  # a hostile __repr__, an int of more digits than Python prints
        return f"<{type(value).__name__}>"
    return text if len(text) <= MOST_REPR else f"{text[:MOST_REPR]}…"


def _storable(name: Any) -> str:
    """The name of a metric or column, without the lone surrogates that files cannot hold."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < MOST_BITS else safe_repr(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return _plain(value.tolist()) if hasattr(value, "tolist") else safe_repr(value)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python and, where they are imported, numpy and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def describe(reward: LoadedReward) -> dict[str, Any]:
    """What only the import could tell of a function, by the names of RewardSource's fields."""
    return {
        "parameters": reward.parameters.names,
        "required": reward.parameters.required,
        "takes_any_keyword": reward.parameters.takes_any_keyword,
        "is_async": reward.is_async,
        "has_check_rows": callable(getattr(reward.function, "check_rows", None)),
        "is_signature_known": True,
    }


def check_rows(reward: LoadedReward, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The notices of the function's `check_rows(columns)`, or what is wrong with the data, or how it failed.

    It gets those of the recipe's kwargs that it takes; what it returns, or warns of, are notices; ValueError says that the data is wrong.
    """
    check = reward.function.check_rows  # type: ignore[attr-defined]
    takes = inspect_parameters(check)
    kwargs = {name: value for name, value in reward.kwargs.items() if takes.takes_any_keyword or name in takes.names}
    try:
        with warnings.catch_warnings(record=True) as caught:
            returned = check(columns, **kwargs)
        notices = [returned] if isinstance(returned, str) else [str(notice) for notice in returned or ()]
        return {"notices": [*notices, *(str(warning.message) for warning in caught)]}
    except ValueError as error:
        return {"wrong": str(error)}
    except BaseException as error:  # user code
        return failure(error)
