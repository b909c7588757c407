"""Groups in, rewards out: every reward function of a recipe, called in workers that can be killed.

A group goes to an idle worker as soon as it is submitted; its functions are called one after the other, coroutine functions beside each
other. After a failure the failed rows are called again one by one in a worker that did nothing before; a row that fails again is an error.
A value is whatever the function returned, the same for any number of workers: every call has a seed of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import DataError, RecipeError, RewardError
from rloo_cli.rewards import calls
from rloo_cli.rewards.dispatch import Dispatcher
from rloo_cli.rewards.environment import worker_environment
from rloo_cli.rewards.jobs import check_request, plain_group
from rloo_cli.rewards.ledger import Ledger
from rloo_cli.rewards.memory import memory_share
from rloo_cli.rewards.models import OpenModel, check_entry, find_entry, open_entry
from rloo_cli.rewards.modules import search_path
from rloo_cli.rewards.parameters import is_built_in
from rloo_cli.rewards.pool import POLL_SECONDS, Event, WorkerPool
from rloo_cli.rewards.resolve import RewardSource
from rloo_cli.rewards.worker import expand_rows
from rloo_cli.types import Group, GroupRewards, TrainerState

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry

LOGGER = logging.getLogger(__name__)

LOAD_SECONDS = 50.0
"""Longest import of the reward functions."""
CHECK_SECONDS = 600.0
"""Longest `check_rows`, however many rows there are."""
HEARTBEAT_SECONDS = 60.0

CheckStop = Callable[[], None]


class RewardRunner:
    """Calls reward functions. Owns worker processes from `start` to `close`; usable in a `with` statement."""

    names: tuple[str, ...]
    """One for each entry: its `name`, or the function's."""
    sources: tuple[RewardSource, ...]
    """One for each entry; after `start` with what only the import could tell."""

    def __init__(
        self,
        entries: Sequence[RewardEntry],
        *,
        code_dir: Path,
        num_workers: int,
        log_dir: Path | None,
        memory_limit: int | None = None,
        load_timeout: float = LOAD_SECONDS,
    ) -> None:
        """Find the functions; nothing runs yet.

        `log_dir`: where workers' output goes (`reward-worker-N.log`), None = nowhere. `memory_limit`: bytes that each
        worker process may hold, and a worker with its children, None = what is available now, divided by workers and trainer. `load_timeout`: seconds.

        Raises:
            RecipeError: a function does not exist, its `kwargs` do not fit, or two entries have the same name.
        """
        self.sources = tuple(find_entry(entry, code_dir=code_dir) for entry in entries)
        self.names = tuple(entry.name or source.name for entry, source in zip(entries, self.sources, strict=True))
        doubled = [name for name in self.names if self.names.count(name) > 1]
        if doubled:
            raise RecipeError(f"two rewards are named `{doubled[0]}`: give one of them another `name`")
        self._entries = tuple(entries)
        self._check_arguments(None)
        # A recipe with built-in rewards alone is data, whatever modules lie beside it: none of them may stand in for an installed one.
        modules = [source.module for source, entry in zip(self.sources, entries, strict=True) if entry.model is None]
        self._code_dir = None if all(map(is_built_in, modules)) else code_dir
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._memory_limit = memory_limit
        self._load_timeout = load_timeout
        self._ledger = Ledger(self._entries, self.names)
        self._in_workers = [k for k, entry in enumerate(entries) if entry.run_in == "worker" and entry.model is None]
        self._in_trainer: dict[int, calls.LoadedReward] = {}
        self._pool: WorkerPool | None = None
        self._dispatcher: Dispatcher | None = None

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, check_stop: CheckStop | None = None, *, open_model: OpenModel | None = None) -> None:
        """Import every function and start the workers. Call it before torch is imported; `open_model` may import it, the workers run then.

        Raises:
            RecipeError: an import fails, ends the process or does not end; a model cannot be opened.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            told: dict[int, dict[str, Any]] = {}
            if self._in_workers:
                self._pool = self._new_pool()
                told = dict(zip(self._in_workers, self._pool.start(check_stop), strict=True))
            for k in set(range(len(self._entries))) - set(self._in_workers):
                if self._entries[k].model is not None:
                    self._in_trainer[k] = open_entry(self._entries[k], self.names[k], f"rewards[{k}].model", open_model)
                    continue
                self._in_trainer[k] = self._load_in_trainer(k)
                told[k] = calls.describe(self._in_trainer[k])
            self.sources = tuple(_told(source, told.get(k, {})) for k, source in enumerate(self.sources))
            self._check_arguments(None)
            if self._pool is not None:
                self._dispatcher = Dispatcher(self._pool, self._ledger, self._entries, {k: self.sources[k] for k in self._in_workers})
            undo.pop_all()

    def load_models(self) -> None:
        """Read the weights of the reward models, once. Call it when this process has its device, before the first `submit`.

        Raises:
            RecipeError: they cannot be read.
        """
        for k, entry in enumerate(self._entries):
            if entry.model is not None:
                self._in_trainer[k].function.load()  # type: ignore[attr-defined]

    def check_rows(self, columns: Mapping[str, list[Any]], check_stop: CheckStop | None = None) -> tuple[str, ...]:
        """What the functions' own `check_rows(columns)` noticed, a line each; a function without one is not asked.

        Raises:
            RecipeError: a function needs an argument that is no column.
            DataError: a function refuses the data.
            RewardError: a `check_rows` failed or was late.
        """
        self._check_arguments(list(columns))
        notices = []
        for k, name in enumerate(self.names):
            if not self.sources[k].has_check_rows:
                continue
            result = (
                calls.check_rows(self._in_trainer[k], columns) if k in self._in_trainer else self._check_in_worker(k, columns, check_stop)
            )
            if "wrong" in result:
                raise DataError(f"reward `{name}`: {result['wrong']}")
            if "error" in result:
                LOGGER.error("check_rows of %s failed\n%s", name, result["traceback"])
                raise RewardError(f"reward `{name}`: its check_rows failed: {result['error']}")
            notices += [f"reward `{name}`: {notice}" for notice in result["notices"]]
        return tuple(notices)

    def submit(self, key: int, group: Group, state: TrainerState) -> None:
        """Begin with the rewards of a group; `key` names it in what `collect` returns. Never waits for a reward.

        Raises:
            DataError: a column holds what no worker can be given.
        """
        self._ledger.add_group(key, group, state)
        chosen = [k for k in self._in_workers if self._entries[k].call == "group"]
        if chosen and self._dispatcher is not None:
            self._dispatcher.add([(key, group)], chosen)
            self.poll()

    def poll(self) -> None:
        """Take what has come back and hand out what waits, without waiting. Worth calling now and then between `submit`s."""
        if self._dispatcher is not None:
            self._dispatcher.pump(0.0)

    def collect(self, check_stop: CheckStop | None = None) -> dict[int, GroupRewards]:
        """The rewards of everything that was submitted since the last `collect`, by key.

        `check_stop` is called at least every 50 ms and raises to give up; then call `discard`.

        Raises:
            RewardError: a row failed twice under `on_error: stop`; the message names function, prompt row, completion and value.
            DataError: a column holds what no worker can be given.
        """
        groups = list(self._ledger.groups.items())
        for k in self._in_workers if groups else []:
            if self._entries[k].call == "batch" and self._dispatcher is not None:
                self._dispatcher.add(groups, [k])
        self.poll()
        for k in self._in_trainer if groups else []:
            is_whole = self._entries[k].call == "batch" or self._entries[k].model is not None
            for portion in [groups] if is_whole else [[pair] for pair in groups]:
                self._call_in_trainer(k, portion, check_stop)
        self._wait(check_stop)
        rewards = self._ledger.rewards()
        self._ledger.forget()
        return rewards

    def discard(self) -> None:
        """Forget everything that was submitted; workers that are busy with it are replaced."""
        self._ledger.forget()
        if self._dispatcher is not None:
            self._dispatcher.forget()

    def close(self) -> None:
        """End the workers and everything that they started; safe to call twice."""
        self._dispatcher = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _check_arguments(self, columns: Sequence[str] | None) -> None:
        for source, entry in zip(self.sources, self._entries, strict=True):
            check_entry(entry, source, columns=columns)

    def _new_pool(self) -> WorkerPool:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        allowed = {name for entry in self._entries for name in entry.env}
        return WorkerPool(
            functions=[self._function(k) for k in self._in_workers],
            path=search_path(self._code_dir),
            environment=worker_environment(os.environ, allowed),
            num_workers=self._num_workers,
            log_dir=self._log_dir,
            memory_limit=self._memory_limit if self._memory_limit is not None else memory_share(self._num_workers),
            load_timeout=self._load_timeout,
        )

    def _function(self, k: int) -> dict[str, Any]:
        source, entry = self.sources[k], self._entries[k]
        return {"index": k, "module": source.module, "name": source.name, "kwargs": entry.kwargs, "timeout": entry.timeout}

    def _load_in_trainer(self, k: int) -> calls.LoadedReward:
        if self._code_dir is not None and str(self._code_dir.resolve()) not in sys.path:
            sys.path.insert(0, str(self._code_dir.resolve()))
        loaded = calls.load_or_fail(self._function(k))
        if isinstance(loaded, dict):
            LOGGER.error("importing %s failed\n%s", self.sources[k].module, loaded["traceback"])
            raise RecipeError(f"importing `{self.sources[k].module}` for the reward `{self.names[k]}` failed: {loaded['error']}")
        return loaded

    def _call_in_trainer(self, k: int, groups: Sequence[tuple[int, Group]], check_stop: CheckStop | None) -> None:
        """Call a function over these groups in this process; rows that fail are called again one by one."""
        call = self._ledger.add_call(k, groups)
        rows = [plain_group(group, columns=None, with_ids=True) for _, group in groups]
        attempts: list[Sequence[int] | None] = [None]
        while attempts:
            if check_stop is not None:
                check_stop()
            self._ledger.raise_error()
            items = attempts.pop(0)
            started = time.perf_counter()
            result = calls.call(self._in_trainer[k], expand_rows(rows, items), self._ledger.state, seed=None)
            call.seconds += time.perf_counter() - started
            again = self._ledger.settle(call, items if items is not None else range(len(call.values)), result, is_first=items is None)
            attempts += [(item,) for item in again]
            self.poll()

    def _wait(self, check_stop: CheckStop | None) -> None:
        def describe() -> str:
            calls_ = self._ledger.unfinished()
            return f"reward `{self.names[calls_[0].function]}`, {self._ledger.place(calls_[0])}, and {len(calls_) - 1} more calls"

        for seconds in _turns(check_stop, describe):
            self._ledger.raise_error()
            if self._dispatcher is None or not self._ledger.unfinished():
                return
            self._dispatcher.pump(seconds)

    def _check_in_worker(self, k: int, columns: Mapping[str, list[Any]], check_stop: CheckStop | None) -> dict[str, Any]:
        assert self._pool is not None
        rows = max((len(column) for column in columns.values()), default=1)
        limit = min(CHECK_SECONDS, self._entries[k].timeout * max(1, rows))
        worker = next(worker for worker in self._pool.workers if worker.is_ready and not worker.jobs)
        self._pool.send(worker, self, check_request(k, columns), limit)
        for seconds in _turns(check_stop, lambda: f"reward `{self.names[k]}` to check {rows} rows"):
            for event in self._pool.wait(seconds):
                if event.worker is worker:
                    worker.jobs.clear()
                    return event.answer if event.answer is not None else _ended_check(event, limit)
        raise AssertionError("turns have no end")


def _turns(check_stop: CheckStop | None, describe: Callable[[], str]) -> Iterator[float]:
    """Seconds to wait, again and again; looks for a stop before each turn and tells every minute what is waited for."""
    started = told = time.monotonic()
    while True:
        if check_stop is not None:
            check_stop()
        yield POLL_SECONDS if check_stop is not None else 1.0
        now = time.monotonic()
        if now - told >= HEARTBEAT_SECONDS:
            told = now
            LOGGER.info("waiting since %.0f s for %s", now - started, describe())


def _ended_check(event: Event, seconds: float) -> dict[str, Any]:
    line = calls.late(seconds) if event.reason is None else f"its worker died: {event.reason}"
    return {"error": line, "traceback": ""}


def _told(source: RewardSource, told: Mapping[str, Any]) -> RewardSource:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return replace(source, **fields)
