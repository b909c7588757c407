"""Ranks that a launcher of the user's own started (`torchrun`, `accelerate launch`), all with the same command line.

Rank 0 decides what `rloo` otherwise decides before it starts any: it checks the recipe, chooses and locks the run folder. The others wait for
its word, which goes through the store that they will meet in.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rloo_cli.errors import NeighbourError, RefusedError, RlooError, StoppedError
from rloo_cli.launch.cluster import MachineOptions
from rloo_cli.launch.interface import interface_to, network_variables
from rloo_cli.launch.job import dump_job, read_job
from rloo_cli.launch.local import held, new_job, train_rank
from rloo_cli.launch.record import lost_neighbours_told
from rloo_cli.launch.target import Target
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from torch.distributed import TCPStore

WORD_SECONDS = 300.0
"""For the other ranks to wait for rank 0, which checks the recipe meanwhile: seconds, minutes on a file system that is busy."""
POLL_SECONDS = 0.1
COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torch and accelerate read to find the other processes."""
LAST_PORT = 65535
FAILED, DECIDED, NOTHING = "failed ", "decided ", "nothing"


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes this one is, as the launcher's environment says."""

    rank: int
    world_size: int
    num_machines: int = 1
    turn: int = 0
    """Trainings that these processes did together before, all of them in the same order."""

    def tell_nothing(self) -> None:
        """Tell the other ranks that there is nothing to do."""
        _store(self).set(_key(self), NOTHING)

    def train(
        self, checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool, leave: Callable[[], None] | None = None
    ) -> None:
        """Train as rank 0, and have the others do their part of it; `leave` is StopSignal's.

        Raises:
            RlooError: each kind with its exit code.
        """
        store = _store(self)  # which is here, where no agent has it, as long as it is held
        with held(target) as (attempt, notes), StopSignal(leave=leave) as stop:
            where = f" on {self.num_machines} machines" if self.num_machines > 1 else ""
            notes = (*notes, f"{self.world_size} processes{where} train together, started by a launcher of yours")
            job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
            store.set(_key(self), DECIDED + dump_job(job))
            _choose_network()
            train_rank(job, stop)


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where a launcher put this process among others; None where it is alone.

    Raises:
        RefusedError: the environment holds a part of what a launcher says, contradicts itself, or has unequally many processes on machines.
    """
    numbers = {name: _number(name, environ[name]) for name in COUNTS if name in environ}
    rank, world_size = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
    if (rank, world_size) == (0, 1) and "LOCAL_RANK" not in numbers:
        return None
    if numbers.keys() >= {"RANK", "WORLD_SIZE"} and rank >= world_size:
        raise RefusedError(f"RANK {rank} of {world_size} in the environment: {world_size} processes count from 0. {_unset(environ)}")
    _refuse_half_set(environ)
    local_rank, local = numbers["LOCAL_RANK"], numbers.get("LOCAL_WORLD_SIZE", world_size)
    if not local or world_size % local:
        raise RefusedError(f"{world_size} processes were started, {local} of them here: each machine needs equally many.")
    if local_rank >= local:
        raise RefusedError(f"LOCAL_RANK {local_rank} of {local} in the environment: those of a machine count from 0. {_unset(environ)}")
    _refuse_port(environ)
    return None if world_size == 1 else Place(rank, world_size, world_size // local)


def refuse_lone(parent: Sequence[str]) -> None:
    """Raise RefusedError where `accelerate launch` was asked for several processes and has started this one alone, as it does without GPUs.

    Args:
        parent: the command line of this process' parent.
    """
    words = list(parent)
    if "launch" not in words or "accelerate" not in "".join(words[: words.index("launch")]):
        return
    words = words[words.index("launch") + 1 :]
    own = next((i for i, word in enumerate(words) if word in ("-m", "--module", "train")), len(words))
    asked = re.search(r" --num[_-]processes[ =](\d+)", "".join(f" {word}" for word in words[:own]))
    if asked is not None and int(asked[1]) > 1:
        raise RefusedError(
            f"accelerate launch was asked for {asked[1]} processes and has started one, as it does where there is no GPU: "
            f"`rloo train RECIPE --num-processes {asked[1]}` starts them, and so does `torchrun --nproc_per_node {asked[1]} -m rloo_cli train`."
        )


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise RefusedError(f"{name} in the environment is {value!r}, no number from 0: `unset {name}`, or let a launcher set it.")
    return int(value)


def _refuse_half_set(environ: Mapping[str, str]) -> None:
    """Raise RefusedError where variables of a launcher were left behind, or a launcher sets too few."""
    if missing := [name for name in NEEDED if not environ.get(name)]:
        given = [name for name in COUNTS if name in environ]
        raise RefusedError(
            f"{', '.join(given)} in the environment {'says' if len(given) == 1 else 'say'} that a launcher started this process, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. {_unset(environ)}"
        )


def _refuse_port(environ: Mapping[str, str]) -> None:
    port = environ["MASTER_PORT"]
    if port == "0":
        raise RefusedError("the launcher names no port to meet at (MASTER_PORT is 0): give it one, or say `torchrun --standalone`.")
    if _number("MASTER_PORT", port) > LAST_PORT:
        raise RefusedError(f"MASTER_PORT in the environment is {port}: ports end at {LAST_PORT}. {_unset(environ)}")


def _unset(environ: Mapping[str, str]) -> str:
    """The remedy."""
    given = [name for name in (*COUNTS, "MASTER_ADDR", "MASTER_PORT") if name in environ]
    return f"To start without a launcher: `unset {' '.join(given)}`; one such as torchrun sets all of them."


def _choose_network() -> None:
    """Have gloo and NCCL take the way by which rank 0 is reached, where nobody has said another."""
    if network := interface_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])):
        for name, value in network_variables(network).items():
            os.environ.setdefault(name, value)


@contextlib.contextmanager
def failure_told(place: Place | None) -> Iterator[None]:
    """Tells the other ranks, where there are some, what rank 0 failed with in the block, so that they need not wait for it."""
    try:
        yield
    except RlooError as error:
        if place is not None:
            with contextlib.suppress(RuntimeError, RefusedError):
                _store(place).set(_key(place), FAILED + (error.message.splitlines() or [""])[0])
        raise


def refuse_other_number(place: Place, checked: CheckedRecipe, options: MachineOptions) -> None:
    """Raise RefusedError where recipe or command line name another number of processes than were started, or machines at all."""
    given = [name for name, value in options.named().items() if value is not None]
    if given:
        raise RefusedError(f"{', '.join(given)}: a launcher has started {place.world_size} processes already, and says where they are.")
    asked = checked.loaded.recipe.run.num_processes
    if asked not in ("auto", place.world_size):
        raise RefusedError(f"run.num_processes: {asked} processes are asked for, and the launcher has started {place.world_size}.")


def train_as_told(place: Place) -> RunFolder | None:
    """The run's folder, after training in it as one of the other ranks, once rank 0 has said what; None where there was nothing to do.

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
        if word == NOTHING:
            return None
        _choose_network()
        job = read_job(word.removeprefix(DECIDED), rank=place.rank)
        train_rank(job, stop)
        return job.folder


def _word(place: Place) -> str:
    store, deadline = _store(place), time.monotonic() + WORD_SECONDS
    while not store.check([_key(place)]):
        if time.monotonic() > deadline:
            raise NeighbourError(f"rank 0 said nothing for {WORD_SECONDS:.0f} s: its own output tells why.")
        time.sleep(POLL_SECONDS)
    return store.get(_key(place)).decode()


def _store(place: Place) -> TCPStore:
    """The store of the rendezvous: the launcher's agent has it, else rank 0.

    Raises:
        RefusedError: nothing can listen there, or nothing answers.
    """
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=WORD_SECONDS)
    try:
        return TCPStore(host, port, is_master=is_master, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0][:160]
        if "EADDRINUSE" in line:
            raise RefusedError(f"MASTER_PORT {port} is already in use on {platform.node()}: give the launcher another one.") from error
        what = f"nothing can listen there on {platform.node()}" if is_master else "rank 0 does not answer there"
        raise RefusedError(f"MASTER_PORT {port} at MASTER_ADDR {host}: {what} ({line}): give the launcher other ones.") from error


def _key(place: Place) -> str:
    environ = os.environ
    return f"rloo/{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{place.turn}"
