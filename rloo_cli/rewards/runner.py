"""Groups in, rewards out: every reward function of a recipe, called in workers that can be killed.

A group goes to an idle worker as soon as it is submitted; its functions are called one after the other, coroutine functions beside each
other. After a failure the failed rows are called again one by one in a worker that did nothing before; a row that fails again is an error.
A value is whatever the function returned, the same for any number of workers: every call has a seed of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.errors import DataError, RecipeError, RewardError
from rloo_cli.rewards import calls
from rloo_cli.rewards.environment import worker_environment
from rloo_cli.rewards.jobs import (
    Call,
    Job,
    Unit,
    assemble,
    check_request,
    first_attempts,
    is_result,
    new_call,
    plain_group,
    second_attempts,
)
from rloo_cli.rewards.modules import search_path
from rloo_cli.rewards.pool import POLL_SECONDS, Event, Worker, WorkerPool
from rloo_cli.rewards.resolve import RewardSource, check_arguments, find_reward
from rloo_cli.rewards.worker import expand_rows
from rloo_cli.types import Group, GroupRewards, TrainerState

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry

LOGGER = logging.getLogger(__name__)

LOAD_SECONDS = 50.0
"""Longest import of the reward functions."""
CHECK_SECONDS = 600.0
"""Longest `check_rows`, however many rows there are."""
LEAST_MEMORY = 2 * 2**30
HEARTBEAT_SECONDS = 60.0


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

        `log_dir`: where workers' output goes (`reward-worker-N.log`), None = nowhere. `memory_limit`: bytes of private data that each
        worker process may hold, None = what is available now, divided by workers and trainer.

        Raises:
            RecipeError: a function does not exist, its `kwargs` do not fit, or two entries have the same name.
        """
        self.sources = tuple(find_reward(entry.function, code_dir=code_dir) for entry in entries)
        self.names = tuple(entry.name or source.name for entry, source in zip(entries, self.sources, strict=True))
        for entry, source, name in zip(entries, self.sources, self.names, strict=True):
            check_arguments(source, columns=None, kwargs=entry.kwargs)
            if self.names.count(name) > 1:
                raise RecipeError(f"two rewards are named `{name}`: give one of them another `name`")
        self._entries = tuple(entries)
        self._code_dir = code_dir
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._memory_limit = memory_limit
        self._load_timeout = load_timeout
        self._pool: WorkerPool | None = None
        self._in_trainer: dict[int, calls.LoadedReward] = {}
        self._groups: dict[int, Group] = {}
        self._calls: list[Call] = []
        self._parts: dict[int, list[tuple[Call, int]]] = {}
        """The calls of each group, with the position of its first row in them."""
        self._queue: deque[Job] = deque()
        self._state = TrainerState(step=0, max_steps=0)
        self._error: RewardError | None = None

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, check_stop: Callable[[], None] | None = None) -> None:
        """Import every function and start the workers. Call it before torch is imported.

        Raises:
            RecipeError: an import fails, ends the process or does not end.
        """
        in_workers = [k for k, entry in enumerate(self._entries) if entry.run_in == "worker"]
        told: dict[int, dict[str, Any]] = {}
        if in_workers:
            self._pool = self._new_pool(in_workers)
            try:
                told = dict(zip(in_workers, self._pool.start(check_stop), strict=True))
            except BaseException:
                self.close()
                raise
        for k in range(len(self._entries)):
            if k not in told:
                self._in_trainer[k] = self._load_in_trainer(k)
                told[k] = calls.describe(self._in_trainer[k])
        self.sources = tuple(_told(source, told[k]) for k, source in enumerate(self.sources))
        self._is_async = [source.is_async for source in self.sources]
        self._wanted_columns = self._columns_of_workers()
        for k, entry in enumerate(self._entries):
            check_arguments(self.sources[k], columns=None, kwargs=entry.kwargs)

    def check_rows(self, columns: Mapping[str, list[Any]], check_stop: Callable[[], None] | None = None) -> tuple[str, ...]:
        """What the functions' own `check_rows(columns)` noticed, a line each; a function without one is not asked.

        Raises:
            RecipeError: a function needs an argument that is no column.
            DataError: a function refuses the data.
            RewardError: a `check_rows` failed or was late.
        """
        for k, entry in enumerate(self._entries):
            check_arguments(self.sources[k], columns=columns.keys(), kwargs=entry.kwargs)
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
        if key in self._groups:
            raise ValueError(f"key {key} was submitted before")
        self._groups[key], self._parts[key] = group, []
        self._state = state
        chosen = [k for k, entry in enumerate(self._entries) if entry.call == "group" and k not in self._in_trainer]
        if chosen:
            self._queue_first([(key, group)], chosen)
            self.poll()

    def poll(self) -> None:
        """Take what has come back and hand out what waits, without waiting. Worth calling now and then between `submit`s."""
        if self._pool is not None:
            self._dispatch()
            self._pump(0.0)

    def collect(self, check_stop: Callable[[], None] | None = None) -> dict[int, GroupRewards]:
        """The rewards of everything that was submitted since the last `collect`, by key.

        `check_stop` is called at least every 50 ms and raises to give up; then call `discard`.

        Raises:
            RewardError: a row failed twice under `on_error: stop`; the message names function, prompt row, completion and value.
            DataError: a column holds what no worker can be given.
        """
        groups = list(self._groups.items())
        batched = [k for k, entry in enumerate(self._entries) if entry.call == "batch" and k not in self._in_trainer]
        for k in batched if groups else []:
            self._queue_first(groups, [k])
        self.poll()
        self._call_in_trainer(groups, check_stop)
        self._wait(check_stop)
        rewards = {key: assemble(self._parts[key], self.names, group) for key, group in groups}
        self._forget()
        return rewards

    def discard(self) -> None:
        """Forget everything that was submitted; workers that are busy with it are replaced."""
        self._forget()
        for worker in list(self._pool.workers) if self._pool is not None else []:
            if worker.job is not None and self._pool is not None:
                self._pool.replace(worker)

    def close(self) -> None:
        """End the workers and everything that they started; safe to call twice."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _new_pool(self, in_workers: Sequence[int]) -> WorkerPool:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        allowed = {name for entry in self._entries for name in entry.env}
        return WorkerPool(
            functions=[self._function(k) for k in in_workers],
            path=search_path(self._code_dir),
            environment=worker_environment(os.environ, allowed),
            num_workers=self._num_workers,
            log_dir=self._log_dir,
            memory_limit=self._memory_limit if self._memory_limit is not None else _memory_share(self._num_workers),
            load_timeout=self._load_timeout,
        )

    def _function(self, k: int) -> dict[str, Any]:
        source, entry = self.sources[k], self._entries[k]
        return {"index": k, "module": source.module, "name": source.name, "kwargs": entry.kwargs, "timeout": entry.timeout}

    def _load_in_trainer(self, k: int) -> calls.LoadedReward:
        folder = str(self._code_dir.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        loaded = calls.load_or_fail(self._function(k))
        if isinstance(loaded, dict):
            LOGGER.error("importing %s failed\n%s", self.sources[k].module, loaded["traceback"])
            raise RecipeError(f"importing `{self.sources[k].module}` for the reward `{self.names[k]}` failed: {loaded['error']}")
        return loaded

    def _columns_of_workers(self) -> frozenset[str] | None:
        """The columns that some function in a worker takes; None = all of them."""
        sources = [source for k, source in enumerate(self.sources) if k not in self._in_trainer]
        if any(source.takes_any_keyword for source in sources):
            return None
        return frozenset(name for source in sources for name in source.parameters)

    def _queue_first(self, groups: Sequence[tuple[int, Group]], chosen: Sequence[int]) -> None:
        wanted = self._wanted_columns
        with_ids = wanted is None or "completion_ids" in wanted
        started = [self._new_call(k, groups) for k in chosen]
        self._queue.append(
            Job(
                groups=groups,
                rows=[plain_group(group, columns=wanted, with_ids=with_ids) for _, group in groups],
                state=self._state,
                units=first_attempts(started, self._entries, self._is_async),
            )
        )

    def _new_call(self, k: int, groups: Sequence[tuple[int, Group]]) -> Call:
        call, first = new_call(k, groups), 0
        self._calls.append(call)
        for key, group in groups:
            self._parts[key].append((call, first))
            first += len(group.texts)
        return call

    def _dispatch(self) -> None:
        """Give what waits to idle workers, in order."""
        assert self._pool is not None
        for job in list(self._queue):
            if not any(worker.job is None for worker in self._pool.workers):
                return
            worker = self._worker_for(job)
            if worker is not None:
                self._queue.remove(job)
                self._pool.send(worker, job, job.request(), job.units[0].seconds)

    def _worker_for(self, job: Job) -> Worker | None:
        assert self._pool is not None
        idle = [worker for worker in self._pool.workers if worker.is_ready and worker.job is None]
        fresh = [worker for worker in idle if worker.is_fresh]
        if not job.needs_fresh:
            return next((worker for worker in idle if not worker.is_fresh), fresh[0] if fresh else None)
        if not fresh and idle and all(worker.is_ready for worker in self._pool.workers):
            self._pool.replace(idle[0])  # its successor takes the job
        return fresh[0] if fresh else None

    def _pump(self, timeout: float) -> None:
        assert self._pool is not None
        for event in self._pool.wait(timeout):
            if isinstance(event.job, Job) and event.job.units:
                self._note(event, event.job)
        self._dispatch()

    def _note(self, event: Event, job: Job) -> None:
        """Settle the unit that an event ends."""
        unit = job.units.popleft()
        items = unit.items if unit.items is not None else range(len(unit.calls[0].values))
        if event.answer is None:
            results = [self._ended(call, event, len(items)) for call in unit.calls]
            if job.units:
                self._queue.appendleft(job)
        else:
            results = self._results(event.answer, unit, len(items))
            event.worker.job = job if job.units else None
            event.worker.deadline = time.monotonic() + job.units[0].seconds if job.units else float("inf")
        for call, result in zip(unit.calls, results, strict=True):
            again = self._settle(call, items, result, is_first=unit.items is None)
            if again:
                units = second_attempts(call, again, self._entries, self._is_async)
                self._queue.appendleft(Job(groups=job.groups, rows=job.rows, state=job.state, units=units, needs_fresh=True))

    def _ended(self, call: Call, event: Event, count: int) -> dict[str, Any]:
        limit = self._entries[call.function].timeout * count
        line = f"{calls.late(limit)}, its worker was killed" if event.reason is None else f"its worker died: {event.reason}"
        return {"error": line, "retry": True, "traceback": ""}

    @staticmethod
    def _results(answer: Mapping[str, Any], unit: Unit, count: int) -> list[dict[str, Any]]:
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(unit.calls) or not all(is_result(result, count) for result in results):
            return [{"error": "its worker sent an answer of the wrong form", "retry": True, "traceback": ""} for _ in unit.calls]
        for call in unit.calls:
            call.seconds += answer["seconds"] / len(unit.calls)
        return results

    def _settle(self, call: Call, items: Sequence[int], result: Mapping[str, Any], *, is_first: bool) -> list[int]:
        """Note a result; the rows that are to be called again."""
        if "error" in result:
            lines = dict.fromkeys(items, result["error"])
            again = is_first and result["retry"]
        else:
            call.take(items, result)
            lines = {items[int(i)]: line for i, line in result["bad"].items()}
            again = is_first
        for item, line in lines.items() if not again else []:
            call.fail(item, line)
        if lines:
            self._tell(call, lines, result, again=again)
        return sorted(lines) if again else []

    def _tell(self, call: Call, lines: Mapping[int, str], result: Mapping[str, Any], *, again: bool) -> None:
        """Log failures; keep the first for good as the error to raise, where they stop the run."""
        item, line = next(iter(lines.items()))
        where = self._place(call, item, whole=len(lines) > 1 and "error" in result)
        message = f"reward `{self.names[call.function]}`: {where}: {line}"
        level = logging.WARNING if again or self._entries[call.function].on_error == "unscored" else logging.ERROR
        LOGGER.log(level, "%s%s", message, f"\n{result['traceback']}" if result.get("traceback") else "")
        if not again and self._entries[call.function].on_error == "stop" and self._error is None:
            self._error = RewardError(f"{message}. `on_error: unscored` in the recipe would leave such completions out.")

    def _place(self, call: Call, item: int, *, whole: bool) -> str:
        group, g = call.place(item)
        step = f"step {self._state.step}, " if self._state.step else ""
        return f"{step}prompt row {group.prompt.row}" + ("" if whole else f", completion {g}")

    def _call_in_trainer(self, groups: Sequence[tuple[int, Group]], check_stop: Callable[[], None] | None) -> None:
        for k, reward in self._in_trainer.items():
            portions = [groups] if self._entries[k].call == "batch" else [[pair] for pair in groups]
            for portion in portions if groups else []:
                call = self._new_call(k, portion)
                rows = [plain_group(group, columns=None, with_ids=True) for _, group in portion]
                again: Sequence[Sequence[int] | None] = [None]
                while again:
                    again = [item for items in again for item in self._attempt(reward, call, rows, items, check_stop)]

    def _attempt(
        self,
        reward: calls.LoadedReward,
        call: Call,
        rows: Sequence[Any],
        items: Sequence[int] | None,
        check_stop: Callable[[], None] | None,
    ) -> list[Sequence[int]]:
        """Call a function in this process; the rows to call again, each by itself."""
        if check_stop is not None:
            check_stop()
        if self._error is not None:
            raise self._error
        started = time.perf_counter()
        result = calls.call(reward, expand_rows(rows, items), self._state, seed=None)
        call.seconds += time.perf_counter() - started
        again = self._settle(call, items if items is not None else range(len(call.values)), result, is_first=items is None)
        self.poll()
        return [(item,) for item in again]

    def _wait(self, check_stop: Callable[[], None] | None) -> None:
        started = told = time.monotonic()
        while True:
            if check_stop is not None:
                check_stop()
            if self._error is not None:
                raise self._error
            unfinished = [call for call in self._calls if call.pending]
            if not unfinished:
                return
            self._pump(POLL_SECONDS if check_stop is not None else 1.0)
            now = time.monotonic()
            if now - told >= HEARTBEAT_SECONDS:
                told = now
                call = unfinished[0]
                where = self._place(call, 0, whole=True)
                LOGGER.info(
                    "waiting for reward `%s`, %s and %d more, since %.0f s",
                    self.names[call.function],
                    where,
                    len(unfinished) - 1,
                    now - started,
                )

    def _check_in_worker(self, k: int, columns: Mapping[str, list[Any]], check_stop: Callable[[], None] | None) -> dict[str, Any]:
        assert self._pool is not None
        seconds = min(CHECK_SECONDS, self._entries[k].timeout * max(1, *(len(column) for column in columns.values())))
        worker = next(worker for worker in self._pool.workers if worker.is_ready and worker.job is None)
        self._pool.send(worker, self, check_request(k, columns), seconds)
        while True:
            if check_stop is not None:
                check_stop()
            for event in self._pool.wait(POLL_SECONDS if check_stop is not None else 1.0):
                if event.job is not self:
                    continue
                if event.answer is None:
                    return self._ended_check(event, seconds)
                event.worker.job = None
                return event.answer

    @staticmethod
    def _ended_check(event: Event, seconds: float) -> dict[str, Any]:
        line = calls.late(seconds) if event.reason is None else f"its worker died: {event.reason}"
        return {"error": line, "traceback": ""}

    def _forget(self) -> None:
        self._groups, self._calls, self._parts, self._error = {}, [], {}, None
        self._queue.clear()


def _told(source: RewardSource, told: Mapping[str, Any]) -> RewardSource:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return replace(source, **fields)


def _memory_share(num_workers: int) -> int:
    import psutil

    return max(LEAST_MEMORY, psutil.virtual_memory().available // (num_workers + 1))
