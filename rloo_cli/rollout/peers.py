"""What an engine needs of the other ranks of a run: to put requests together, and to end alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from rloo_cli.errors import RlooError
from rloo_cli.rollout.engine import GenerationRequest

T = TypeVar("T")


class Peers(Protocol):
    """Ranks that make the same calls in the same order, as `run.ranks.Ranks` has them. Its methods are collectives."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    @property
    def group(self) -> Any:
        """Their gloo group; None in a world of one."""

    def gather(self, value: T) -> list[T]:
        """The values of all, in order."""

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns; where one's failed, all fail."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A world of one."""

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def gather(self, value: T) -> list[T]:
        """The value."""
        return [value]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns."""
        return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch:
    """The requests of ranks that share one engine, all of which generate all of them."""

    requests: tuple[GenerationRequest, ...]
    """Of every rank, in the order of ranks."""
    own: range
    """Which of them are this rank's."""


def shared_batch(peers: Peers, requests: Sequence[GenerationRequest]) -> SharedBatch:
    """The union of every rank's requests; a collective."""
    parts = peers.gather(tuple(requests))
    start = sum(len(part) for part in parts[: peers.rank])
    return SharedBatch(requests=tuple(request for part in parts for request in part), own=range(start, start + len(requests)))


def agree(peers: Peers, work: Callable[[], None]) -> None:
    """Do the work on every rank; where one's failed, or was told to stop, all fail here. Cheap where nothing fails.

    Raises:
        As `Peers.together` does.
    """
    if peers.world_size == 1:
        work()
        return
    failure: BaseException | None = None
    try:
        work()
    except (RlooError, KeyboardInterrupt) as error:  # a stop is a KeyboardInterrupt
        failure = error
    has_failed = torch.tensor([failure is not None], dtype=torch.uint8)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=peers.group)
    if has_failed.item():
        peers.together(lambda: _raise(failure))


def arrive(peers: Peers) -> dist.Work | None:
    """This rank's word that it is done: complete once every rank has given it. None in a world of one. Nobody has to wait for it."""
    if peers.world_size == 1:
        return None
    return dist.all_reduce(torch.zeros(1), group=peers.group, async_op=True)


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
