"""Ranks whose passes are collectives, kept side by side: none may leave while another waits for it in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rloo_cli.errors import RlooError
from rloo_cli.run.ranks import Ranks
from rloo_cli.run.signals import StopSignal
from rloo_cli.training.microbatches import GroupRows

FILLER = [GroupRows(group=0, prompt_ids=(0,), rows=(), completion_ids=((0,),))]
"""A micro-batch of one token and no row, for a rank that has run out of its own."""


class Passes:
    """The passes of one rank, each a micro-batch.

    Out of lockstep it looks for a stop before each. In lockstep every rank runs as many as the one with the most; before each of them all
    tell each other whether one has failed or was asked to stop, and then leave together.
    """

    def __init__(self, ranks: Ranks, stop: StopSignal, *, is_lockstep: bool) -> None:
        self._ranks = ranks
        self._stop = stop
        self._is_lockstep = is_lockstep
        self._failure: RlooError | None = None

    def run(self, shares: Sequence[Sequence[list[GroupRows]]], *, at_least: int = 0) -> Iterator[tuple[list[GroupRows], bool]]:
        """(micro-batch, whether it is the last) for this rank, out of all ranks' shares; fillers where another has more, up to `at_least`.

        Raises:
            StopRequested: a stop was asked for here.
            RlooError: what `held_back` kept.
        """
        own = shares[self._ranks.rank]
        if not self._is_lockstep:
            for i, pieces in enumerate(own):
                self._stop.check()
                yield pieces, i == len(own) - 1
            return
        self._failure = None
        count = max(at_least, *(len(share) for share in shares))
        for i in range(count):
            if self._is_over():
                return  # another rank's reason, which it tells when all are out
            yield own[i] if i < len(own) else FILLER, i == count - 1
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """In lockstep an error of the block is raised before the next pass only: the pass in progress has to be completed."""
        try:
            yield
        except RlooError as error:
            if not self._is_lockstep:
                raise
            self._failure = self._failure or error

    def _is_over(self) -> bool:
        if not self._any(self._failure is not None or self._stop.received is not None):
            return False
        if self._failure is not None:
            raise self._failure
        self._stop.check()
        return True

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any rank; a collective."""
        if self._ranks.world_size == 1:
            return flag
        told = torch.tensor([int(flag)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return bool(told.item())
