"""Ranks that a launcher of the user's own started (`torchrun`, `accelerate launch`), all with the same command line.

Rank 0 decides what `rloo` otherwise decides before it starts any: it checks the recipe, chooses and locks the run folder. The others wait for
its word, which goes through the store that they will meet in.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rloo_cli.errors import NeighbourError, RefusedError, RlooError, StoppedError
from rloo_cli.launch.job import dump_job, read_job
from rloo_cli.launch.joining import refuse_sharded
from rloo_cli.launch.local import held, new_job, train_rank
from rloo_cli.launch.record import lost_neighbours_told
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from torch.distributed import TCPStore

WORD_SECONDS = 300.0
"""For the other ranks to wait for rank 0, which checks the recipe meanwhile: seconds, minutes on a file system that is busy."""
POLL_SECONDS = 0.1
FAILED, DECIDED, NOTHING = "failed ", "decided ", "nothing"


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes this one is, as the launcher's environment says."""

    rank: int
    world_size: int


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where a launcher put this process among others; None where it is alone.

    Raises:
        RefusedError: the environment holds no numbers, or processes of other machines.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        place = Place(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
        local = int(environ.get("LOCAL_WORLD_SIZE", place.world_size))
    except ValueError:
        raise RefusedError(
            "RANK, WORLD_SIZE or LOCAL_WORLD_SIZE in the environment is no number: unset them, or let a launcher set them."
        ) from None
    if place.world_size == 1:
        return None
    if local != place.world_size:
        raise RefusedError(f"{place.world_size} processes on several machines: this version trains in the processes of one ({local} here).")
    if environ.get("MASTER_PORT") == "0":
        raise RefusedError("the launcher names no port to meet at (MASTER_PORT is 0): give it one, or say `torchrun --standalone`.")
    refuse_sharded(environ)
    return place


@contextlib.contextmanager
def failure_told(place: Place | None) -> Iterator[None]:
    """Tells the other ranks, where there are some, what rank 0 failed with in the block, so that they need not wait for it."""
    try:
        yield
    except RlooError as error:
        if place is not None:
            with contextlib.suppress(RuntimeError):
                _store(place).set(_key(), FAILED + (error.message.splitlines() or [""])[0])
        raise


def tell_nothing(place: Place) -> None:
    """Tell the other ranks that there is nothing to do."""
    _store(place).set(_key(), NOTHING)


def refuse_other_number(place: Place, checked: CheckedRecipe) -> None:
    """Raise RefusedError where the recipe or the command line names another number of processes than were started."""
    asked = checked.loaded.recipe.run.num_processes
    if asked not in ("auto", place.world_size):
        raise RefusedError(f"run.num_processes: {asked} processes are asked for, and the launcher has started {place.world_size}.")


def train_and_tell(place: Place, checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool) -> None:
    """Train as rank 0, and have the others do their part of it.

    Raises:
        RlooError: each kind with its exit code.
    """
    with held(target) as (attempt, notes), StopSignal() as stop:
        notes = (*notes, f"{place.world_size} processes train together, started by a launcher of yours")
        job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
        store = _store(place)  # which is here, where no agent has it, as long as it is held
        store.set(_key(), DECIDED + dump_job(job))
        train_rank(job, stop)


def train_as_told(place: Place) -> None:
    """Train as one of the other ranks, once rank 0 has said what.

    Raises:
        NeighbourError: rank 0 failed, or says nothing.
        RlooError: each kind with its exit code.
    """
    with StopSignal() as stop, lost_neighbours_told():
        try:
            with stop.at_once():
                word = _word(place)
        except StopRequested as stopped:
            raise StoppedError(f"stopped by {stopped.signal_name} before training began.") from stopped
        if word.startswith(FAILED):
            raise NeighbourError(f"rank 0 ended the run: {word.removeprefix(FAILED)}")
        if word != NOTHING:
            train_rank(read_job(word.removeprefix(DECIDED), rank=place.rank), stop)


def _word(place: Place) -> str:
    store, deadline = _store(place), time.monotonic() + WORD_SECONDS
    while not store.check([_key()]):
        if time.monotonic() > deadline:
            raise NeighbourError(f"rank 0 said nothing for {WORD_SECONDS:.0f} s: its own output tells why.")
        time.sleep(POLL_SECONDS)
    return store.get(_key()).decode()


def _store(place: Place) -> TCPStore:
    """The store of the rendezvous: the launcher's agent has it, else rank 0."""
    from torch.distributed import TCPStore

    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "29500")),
        is_master=place.rank == 0 and not has_agent,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=WORD_SECONDS),
    )


def _key() -> str:
    return f"rloo/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
