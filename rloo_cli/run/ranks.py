"""The processes that train together, and what they tell each other. A world of one needs no process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rloo_cli.errors import NeighbourError, RlooError
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DEADLINE = timedelta(minutes=30)
"""For a rank to say something: longer than any part of a step that its neighbours wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who this process is among those of the run. Objects travel over gloo, on the CPU, whatever the devices are.

    Everything but the fields is a collective: all ranks call it, in the same order.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None
    """The gloo group; None in a world of one."""
    first: int = 0
    """What rank 0 of these is among all ranks of the run."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what the run leaves."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The main rank's value."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.gather(None)

    def share(self, count: int) -> range:
        """This rank's part of `count` things in a row: contiguous, and as equal as they come."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, once every rank's has returned; where one failed, all fail here, instead of some waiting for it.

        Raises:
            RlooError, StopRequested: this rank's own.
            NeighbourError: another's.
        """
        if self.world_size == 1:
            return work()
        result, own = None, None
        try:
            result = work()
        except (RlooError, StopRequested) as error:
            own = error
        told = self.gather(None if own is None else (kind_of(own), str(own)))
        if own is not None and not isinstance(own, StopRequested):
            raise own
        failed = [(rank, *words) for rank, words in enumerate(told) if words is not None]
        for rank, kind, words in failed:
            if kind != StopRequested.__name__:
                raise NeighbourError(f"rank {self.first + rank} ended the run: {words}", kind=kind)
        if failed:
            raise StopRequested(failed[0][2])
        return result  # type: ignore[return-value]

    def check(self, stop: StopSignal) -> None:
        """Raise StopRequested on every rank where a stop was asked for on any."""
        if self.world_size == 1:
            stop.check()
            return
        received = next((name for name in self.gather(stop.received) if name is not None), None)
        if received is not None:
            raise StopRequested(received)


ALONE = Ranks()
"""A world of one."""


def join_ranks() -> Ranks:
    """This process among those of the default process group; alone where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    group = dist.new_group(backend="gloo", timeout=DEADLINE)
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), group=group)


def join_neighbours(ranks: Ranks, size: int) -> Ranks:
    """This process among the `size` neighbouring ranks that it shares something with; a collective of all ranks."""
    if size == 1:
        return Ranks()
    import torch.distributed as dist

    firsts = range(0, ranks.world_size, size)
    groups = [dist.new_group(list(range(first, first + size)), backend="gloo", timeout=DEADLINE) for first in firsts]
    number = ranks.rank // size
    return Ranks(rank=ranks.rank % size, world_size=size, group=groups[number], first=firsts[number])


def kind_of(error: BaseException) -> str:
    """The class of the error that began it."""
    return error.kind if isinstance(error, NeighbourError) else type(error).__name__


def merge_known(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of several of a shape: at each place the first that is not NaN, or NaN."""
    import torch

    merged = values[0]
    for other in values[1:]:
        merged = torch.where(merged.isnan(), other, merged)
    return merged
