"""The next generation batch, collected in a thread while the policy is updated (`async_steps: 1`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from rloo_cli.run.signals import StopRequested
from rloo_cli.types import Group, GroupRewards

CheckStop = Callable[[], None]

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """Which generation batch is wanted: its prompts and random numbers follow from this alone."""

    step: int
    """The first optimizer step that it serves."""
    first_prompt: int
    """Position in the endless order of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A generation batch with its rewards, in the order of its prompts: as many as were drawn."""

    groups: Sequence[Group]
    rewards: Sequence[GroupRewards]
    kept: Sequence[int]
    """Indices of the groups that are trained on, ascending: all of them, unless `dynamic_sampling` left some out."""
    seconds: Mapping[str, float]
    """Wall time by phase, by its name in metrics.jsonl."""


class GenerationAhead:
    """At most one batch at a time. Nobody else uses engine and rewards while one is under way: `wait` comes before that.

    Args:
        collect: makes a batch, looking for a stop by the function that it is given.
        check_stop: raises when a stop was asked for.
    """

    def __init__(self, collect: Callable[[BatchOrder, CheckStop], Collected], check_stop: CheckStop) -> None:
        self._collect = collect
        self._check_stop = check_stop
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate-ahead")
        self._order: BatchOrder | None = None
        self._batch: Future[Collected] | None = None

    def start(self, order: BatchOrder) -> None:
        """Begin the batch."""
        self._order, self._batch = order, self._thread.submit(self._collect, order, self._check)

    def take(self, order: BatchOrder) -> Collected:
        """The batch: the one begun before, when it is this one; else made now, in this thread.

        Raises:
            Whatever `collect` raised.
        """
        if self._batch is None or self._order != order:
            return self._collect(order, self._check_stop)
        self.wait()
        batch, self._batch = self._batch, None
        return batch.result()

    def wait(self) -> None:
        """Return once nothing is under way; what it came to is told by `take`."""
        while self._batch is not None and not wait([self._batch], POLL_SECONDS).done:
            self._check_stop()

    def close(self) -> None:
        """Return once the thread has ended, which it does at its next look for a stop."""
        self._is_closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        if self._is_closing:
            raise StopRequested("the end of training")  # as a signal's, it is told to the other ranks' threads
        self._check_stop()
