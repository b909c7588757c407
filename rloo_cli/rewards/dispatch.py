"""Who works at what: jobs wait in a queue, idle workers get them, failed rows come back as jobs for fresh workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_cli.rewards.calls import late
from rloo_cli.rewards.jobs import Call, Job, Unit, first_attempts, is_result, plain_group, second_attempts
from rloo_cli.rewards.ledger import Ledger
from rloo_cli.rewards.pool import Event, Worker, WorkerPool
from rloo_cli.rewards.resolve import RewardSource
from rloo_cli.types import Group

if TYPE_CHECKING:
    from rloo_cli.recipe.schema import RewardEntry

QUICK_SECONDS = 0.005
QUICK_JOBS = 4
"""Where a unit takes less than QUICK_SECONDS, a worker is given this many jobs ahead, so that it need not wait for the trainer to look."""


class Dispatcher:
    """Hands jobs to the workers of a pool and their results to the ledger."""

    def __init__(self, pool: WorkerPool, ledger: Ledger, entries: Sequence[RewardEntry], sources: Mapping[int, RewardSource]) -> None:
        """`sources`: those of the functions that run in workers."""
        self._pool = pool
        self._ledger = ledger
        self._entries = entries
        self._is_async = {k: source.is_async for k, source in sources.items()}
        self._columns = columns_taken(list(sources.values()))
        self._queue: deque[Job] = deque()
        self._last_seconds = float("inf")
        """How long the last unit took in its worker."""

    def add(self, groups: Sequence[tuple[int, Group]], functions: Sequence[int]) -> None:
        """Queue these functions over the rows of these groups."""
        with_ids = self._columns is None or "completion_ids" in self._columns
        job = Job(
            groups=groups,
            rows=[plain_group(group, columns=self._columns, with_ids=with_ids) for _, group in groups],
            state=self._ledger.state,
            units=first_attempts([self._ledger.add_call(k, groups) for k in functions], self._entries, self._is_async),
        )
        self._queue.append(job)

    def pump(self, timeout: float) -> None:
        """Hand out what waits, take what has come back, or comes within `timeout` seconds. Raises DataError for what cannot be sent."""
        self._hand_out()
        for event in self._pool.wait(timeout):
            if event.worker.jobs:
                self._note(event, event.worker.jobs)
        self._hand_out()

    def forget(self) -> None:
        """Drop what waits; workers that are busy are replaced."""
        self._queue.clear()
        for worker in [worker for worker in self._pool.workers if worker.jobs]:
            self._pool.replace(worker)

    def _hand_out(self) -> None:
        while self._queue and self._may_begin(self._queue[0]):
            worker = self._fresh_worker() if self._queue[0].needs_fresh else self._next_worker()
            if worker is None:
                return
            job = self._queue.popleft()
            self._pool.send(worker, job, job.request(), job.units[0].seconds)

    def _may_begin(self, job: Job) -> bool:
        running = [running for worker in self._pool.workers for running in worker.jobs]
        return not running or not (job.is_suspect or any(other.is_suspect for other in running))

    def _next_worker(self) -> Worker | None:
        """The worker with the least to do, if it should have more. One that was used before is preferred: second attempts need fresh ones."""
        most = QUICK_JOBS if self._last_seconds < QUICK_SECONDS else 1
        ready = [worker for worker in self._pool.workers if worker.is_ready and len(worker.jobs) < most]
        return min(ready, key=lambda worker: (len(worker.jobs), worker.is_fresh), default=None)

    def _fresh_worker(self) -> Worker | None:
        idle = [worker for worker in self._pool.workers if worker.is_ready and not worker.jobs]
        fresh = [worker for worker in idle if worker.is_fresh]
        if not fresh and idle and all(worker.is_ready for worker in self._pool.workers):
            self._pool.replace(idle[0])  # its successor takes the job
        return fresh[0] if fresh else None

    def _note(self, event: Event, jobs: deque[Job]) -> None:
        """Settle the unit that an event ends, the first of the worker's first job."""
        if event.is_shared:
            self._do_again(jobs)
            return
        job = jobs[0]
        unit = job.units.popleft()
        items = unit.items if unit.items is not None else range(len(unit.calls[0].values))
        if event.answer is None:
            results = [self._ended(call, event, len(items)) for call in unit.calls]
            self._queue.extendleft(reversed([rest for rest in jobs if rest.units]))
            jobs.clear()
        else:
            results = self._results(event.answer, unit, len(items))
            if not job.units:
                jobs.popleft()
            event.worker.deadline = time.monotonic() + jobs[0].units[0].seconds if jobs else float("inf")
        for call, result in zip(unit.calls, results, strict=True):
            again = self._ledger.settle(call, items, result, is_first=unit.items is None)
            if again:
                units = second_attempts(call, again, self._entries, self._is_async)
                self._queue.appendleft(Job(groups=job.groups, rows=job.rows, state=job.state, units=units, needs_fresh=True))

    def _do_again(self, jobs: deque[Job]) -> None:
        """Queue jobs as they are, to be done alone: the next death is then the fault of whoever works."""
        for job in jobs:
            job.is_suspect = True
        self._queue.extendleft(reversed(jobs))
        jobs.clear()

    def _ended(self, call: Call, event: Event, count: int) -> dict[str, Any]:
        limit = self._entries[call.function].timeout * count
        line = f"{late(limit)}, its worker was killed" if event.reason is None else f"its worker died: {event.reason}"
        return {"error": line, "retry": True, "traceback": ""}

    def _results(self, answer: Mapping[str, Any], unit: Unit, count: int) -> list[dict[str, Any]]:
        results, seconds = answer.get("results"), answer.get("seconds")
        is_sound = isinstance(results, list) and len(results) == len(unit.calls) and all(is_result(result, count) for result in results)
        if not is_sound or not isinstance(results, list) or not isinstance(seconds, float):
            return [{"error": "its worker sent an answer of the wrong form", "retry": True, "traceback": ""} for _ in unit.calls]
        self._last_seconds = seconds
        for call in unit.calls:
            call.seconds += seconds / len(unit.calls)
        return results


def columns_taken(sources: Sequence[RewardSource]) -> frozenset[str] | None:
    """The arguments that some of these functions take; None = every column."""
    if any(source.takes_any_keyword for source in sources):
        return None
    return frozenset(name for source in sources for name in source.parameters)
