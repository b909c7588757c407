"""What is sent to a worker and what became of it. No processes here."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import DataError
from rloo_cli.rewards.calls import METRIC_NAME
from rloo_cli.rewards.protocol import encode
from rloo_cli.types import LARGEST_REWARD, Group, GroupRewards, TrainerState

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry


ASYNC_GRACE_SECONDS = 0.5
"""A coroutine function that is late is cancelled in its worker, so that those beside it can finish; the kill comes this much later."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One function over the rows of one job (a group, or a batch of groups), and its outcome so far."""

    function: int
    groups: Sequence[tuple[int, Group]]
    """(key, group), one after the other."""
    values: list[float | None]
    """One a row."""
    pending: int
    """Rows whose reward is not decided."""
    failures: dict[int, str] = field(default_factory=dict)
    """Row → line, for rows that failed for good."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Each one value a row."""
    retried: dict[int, str] = field(default_factory=dict)
    """Row → line, for rows that failed once and are called again."""
    seconds: float = 0.0

    def take(self, items: Sequence[int], result: Mapping[str, Any]) -> list[int]:
        """Note what a call over these rows returned; the rows whose values are no rewards."""
        bad = {items[int(i)] for i in result["bad"]}
        for item, value in zip(items, result["values"], strict=True):
            if item not in bad:
                self.values[item] = value
        self.pending -= len(items) - len(bad)
        for name, logged in result["metrics"].items():
            self.metrics.setdefault(name, []).extend(logged)
        for column, logged in result["extras"].items():
            kept = self.extras.setdefault(column, [None] * len(self.values))
            for item, value in zip(items, logged, strict=True):
                kept[item] = value
        return sorted(bad)

    def fail(self, item: int, line: str) -> None:
        """Note that a row failed for good."""
        self.failures[item] = line
        self.pending -= 1

    def place(self, item: int) -> tuple[Group, int]:
        """The group and the completion's number in it of a row."""
        for _, group in self.groups:
            if item < len(group.texts):
                return group, item
            item -= len(group.texts)
        raise IndexError(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a worker answers at once: one function, or several coroutine functions beside each other."""

    calls: tuple[Call, ...]
    items: tuple[int, ...] | None
    """The rows it is called with, one after a failure; None = all, the first attempt."""
    seconds: float
    """Its deadline."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Units over the same rows, done by one worker in order."""

    groups: Sequence[tuple[int, Group]]
    rows: list[Any]
    """The groups as a worker gets them."""
    state: TrainerState
    units: deque[Unit]
    needs_fresh: bool = False
    """Whether it may only be given to a worker that did nothing before: a second attempt."""
    is_suspect: bool = False
    """Whether it is to be done while nothing else is: it, or what was done beside it, ended the fork server."""

    def request(self) -> bytes:
        """The message for a worker. Raises DataError where a column cannot be sent."""
        units = [
            {
                "functions": [call.function for call in unit.calls],
                "items": unit.items,
                "seeds": [seed_of(self.state.step, self.groups[0][0], call.function, unit.items) for call in unit.calls],
            }
            for unit in self.units
        ]
        try:
            return encode({"rows": self.rows, "state": [self.state.step, self.state.max_steps], "units": units})
        except TypeError as error:
            row = self.groups[0][1].prompt.row
            raise DataError(
                f"prompt row {row}: a column holds {error}, which no reward worker can be given: use `run_in: trainer`"
            ) from error


def check_request(function: int, columns: Mapping[str, Sequence[Any]]) -> bytes:
    """The message that has a function's `check_rows` called. Raises DataError where a column cannot be sent."""
    try:
        return encode({"check_rows": function, "columns": columns})
    except TypeError as error:
        raise DataError(f"a column holds {error}, which no reward worker can be given: use `run_in: trainer`") from error


def new_call(function: int, groups: Sequence[tuple[int, Group]]) -> Call:
    """A call about which nothing is known."""
    count = sum(len(group.texts) for _, group in groups)
    return Call(function=function, groups=groups, values=[None] * count, pending=count)


def plain_group(group: Group, *, columns: frozenset[str] | None, with_ids: bool) -> dict[str, Any]:
    """The group as a worker gets it; `columns`: those that some function takes, None = all."""
    prompt = group.prompt
    return {
        "prompt": prompt.content,
        "texts": group.texts,
        "ids": [completion.token_ids for completion in group.completions] if with_ids else None,
        "columns": {name: value for name, value in prompt.columns.items() if columns is None or name in columns},
    }


def seed_of(step: int, key: int, function: int, items: Sequence[int] | None) -> int:
    """The seed of a call: the same in whichever worker it happens, another for each call. 32 bits."""
    return zlib.crc32(f"{step}:{key}:{function}:{items}".encode("ascii"))


def first_attempts(calls: Sequence[Call], entries: Sequence[RewardEntry], is_async: Mapping[int, bool]) -> deque[Unit]:
    """The units of a group: its coroutine functions beside each other, then every other function by itself."""
    beside = [call for call in calls if is_async[call.function]]
    others = [[call] for call in calls if not is_async[call.function]]
    return deque(_unit(chosen, None, entries, is_async) for chosen in [beside, *others] if chosen)


def second_attempts(call: Call, items: Sequence[int], entries: Sequence[RewardEntry], is_async: Mapping[int, bool]) -> deque[Unit]:
    """One unit for each of the rows."""
    return deque(_unit([call], (item,), entries, is_async) for item in items)


def _unit(calls: Sequence[Call], items: tuple[int, ...] | None, entries: Sequence[RewardEntry], is_async: Mapping[int, bool]) -> Unit:
    seconds = max(entries[call.function].timeout * len(items or call.values) for call in calls)
    grace = ASYNC_GRACE_SECONDS if is_async[calls[0].function] else 0.0
    return Unit(calls=tuple(calls), items=items, seconds=seconds + grace)


def is_result(result: Any, count: int) -> bool:
    """Whether a worker's result has the form that `calls` gives it: user code can write to its socket."""
    if not isinstance(result, dict):
        return False
    if "error" in result:
        return isinstance(result["error"], str) and isinstance(result.get("retry"), bool) and isinstance(result.get("traceback"), str)
    if not all(isinstance(result.get(key), dict) for key in ("bad", "metrics", "extras", "notices")):
        return False
    return (
        _is_list(result.get("values"), count, lambda value: value is None or _is_finite(value))
        and all(i.isdecimal() and int(i) < count and isinstance(line, str) for i, line in result["bad"].items())
        and all(METRIC_NAME.fullmatch(name) and _is_list(logged, None, _is_summable) for name, logged in result["metrics"].items())
        and all(_is_list(column, count, lambda value: True) for column in result["extras"].values())
        and all(isinstance(line, str) for line in result["notices"].values())
    )


def _is_list(value: Any, count: int | None, fits: Callable[[Any], bool]) -> bool:
    """Whether it is a list of `count` (None: one or more) that all fit."""
    return isinstance(value, list) and (len(value) == count if count is not None else bool(value)) and all(map(fits, value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_summable(value: Any) -> bool:
    return isinstance(value, float) and abs(value) <= LARGEST_REWARD


def assemble(parts: Sequence[tuple[Call, int]], names: Sequence[str], group: Group) -> GroupRewards:
    """The rewards of a group from its calls, each with the position of the group's first row in it; `names`: of all functions."""
    count = len(group.texts)
    values: list[tuple[float | None, ...]] = [(None,) * count] * len(names)
    failures: list[str] = []
    metrics: dict[str, list[float]] = {}
    extras: dict[str, Sequence[Any]] = {}
    for call, first in sorted(parts, key=lambda part: part[0].function):
        values[call.function] = tuple(call.values[first : first + count])
        lines = [(g, call.failures[first + g]) for g in range(count) if first + g in call.failures]
        failures += [f"{names[call.function]}: prompt row {group.prompt.row}, completion {g}: {line}" for g, line in lines]
        extras |= {column: logged[first : first + count] for column, logged in call.extras.items()}
        for name, logged in call.metrics.items():
            metrics.setdefault(name, []).extend(logged)
    return GroupRewards(
        values=tuple(values),
        failures=tuple(failures),
        metrics={name: sum(logged) / len(logged) for name, logged in metrics.items()},
        extras=extras,
        seconds=sum(call.seconds * count / len(call.values) for call, _ in parts),
    )
