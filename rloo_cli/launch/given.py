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
from rloo_cli.launch.cluster import MachineOptions
from rloo_cli.launch.interface import LOOPBACK, interface_to, network_variables
from rloo_cli.launch.job import dump_job, read_job
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
    num_machines: int = 1

    def tell_nothing(self) -> None:
        """Tell the other ranks that there is nothing to do."""
        _store(self).set(_key(), NOTHING)

    def train(self, checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool) -> None:
        """Train as rank 0, and have the others do their part of it.

        Raises:
            RlooError: each kind with its exit code.
        """
        with held(target) as (attempt, notes), StopSignal() as stop:
            where = f" on {self.num_machines} machines" if self.num_machines > 1 else ""
            notes = (*notes, f"{self.world_size} processes{where} train together, started by a launcher of yours")
            job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
            store = _store(self)  # which is here, where no agent has it, as long as it is held
            store.set(_key(), DECIDED + dump_job(job))
            _choose_network()
            train_rank(job, stop)


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where a launcher put this process among others; None where it is alone.

    Raises:
        RefusedError: the environment holds no numbers, or machines with unequally many processes.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise RefusedError(
            "RANK, WORLD_SIZE or LOCAL_WORLD_SIZE in the environment is no number: unset them, or let a launcher set them."
        ) from None
    if world_size == 1:
        return None
    if not local or world_size % local:
        raise RefusedError(f"{world_size} processes were started, {local} of them here: each machine needs equally many.")
    if environ.get("MASTER_PORT") == "0":
        raise RefusedError("the launcher names no port to meet at (MASTER_PORT is 0): give it one, or say `torchrun --standalone`.")
    return Place(rank, world_size, world_size // local)


def _choose_network() -> None:
    """Have gloo and NCCL take the way by which rank 0 is reached, where nobody has said another."""
    if network := interface_to(os.environ.get("MASTER_ADDR", LOOPBACK), int(os.environ.get("MASTER_PORT", "29500"))):
        for name, value in network_variables(network).items():
            os.environ.setdefault(name, value)


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


def refuse_other_number(place: Place, checked: CheckedRecipe, options: MachineOptions) -> None:
    """Raise RefusedError where recipe or command line name another number of processes than were started, or machines at all."""
    given = [name for name, value in options.named().items() if value is not None]
    if given:
        raise RefusedError(f"{', '.join(given)}: a launcher has started {place.world_size} processes already, and says where they are.")
    asked = checked.loaded.recipe.run.num_processes
    if asked not in ("auto", place.world_size):
        raise RefusedError(f"run.num_processes: {asked} processes are asked for, and the launcher has started {place.world_size}.")


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
            _choose_network()
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
