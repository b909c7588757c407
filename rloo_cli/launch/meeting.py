"""Where the launchers of several machines meet: a store that machine 0 has. Each says what it came for; machine 0 says what is done.

machine 0    opens the store, compares what the others came for with its own, and writes its word: failed, nothing to do, or a job
the others   wait until the store answers, say what they came for, and wait for the word
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rloo_cli import errors
from rloo_cli.errors import LostRankError, RefusedError, RlooError
from rloo_cli.launch.cluster import Cluster
from rloo_cli.launch.contact import Contact, Told
from rloo_cli.launch.interface import LOOPBACK, interface_of
from rloo_cli.launch.record import exit_code_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

COME_SECONDS = 600.0
"""For all machines to come: nodes of a batch job come within seconds, and people start a command by hand."""
NAME_SECONDS = 20.0
"""For the name of machine 0 to be known, which may be entered as that machine comes up."""
LATE_SECONDS = 20.0
"""For machines that have not come yet to be told that there is nothing to come for."""
LEAVE_SECONDS = 10.0
"""For the others to have read everything, before machine 0 takes the store with it."""
CONNECT_SECONDS = 5.0
STORE_SECONDS = 30.0
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 3.0
"""Before anything is said of waiting."""
WORD = "word"
FAILED, NOTHING, JOB = "failed", "nothing", "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a launcher says of itself as it comes."""

    machine: int
    host: str
    version: str
    """Of rloo and torch."""
    num_processes: int
    num_machines: int
    gpus: int
    recipe: Mapping[str, Any]
    """Every field, by section."""
    reached: str = ""
    """The address of machine 0 that it is connected to."""


class Meeting:
    """The launchers' store, and this one's line to the others."""

    def __init__(self, cluster: Cluster, store: TCPStore, contact: Contact, *, interface: str | None) -> None:
        self.cluster = cluster
        self.contact = contact
        self.interface = interface
        """By which this machine's processes reach the others; None = not known."""
        self.hosts: dict[int, str] = {cluster.machine_rank: socket.gethostname()}
        self._store = store
        self._has_spoken = False
        self.gone: dict[int, str] = {}
        """Machines that are not waited for any more, and why: they have left, or were not heard of for too long."""

    def told(self) -> list[Told]:
        """What was told since the last time, by this machine too, in the same order for all."""
        news = self.contact.told()
        for told in news:
            if told["kind"] == "left" and told["machine"] != self.cluster.machine_rank:
                self.gone.setdefault(told["machine"], "left")
        return news

    # --- machine 0 -----------------------------------------------------------------------------------------------------------------

    def gather(self, own: Greeting, say: Callable[[str], None]) -> None:
        """Return when every machine has come for the same as this one.

        Raises:
            RefusedError: one came for something else, or did not come.
            RlooError: one left again: its reason.
        """
        came: dict[int, Greeting] = {}
        deadline, quiet_until = time.monotonic() + COME_SECONDS, time.monotonic() + PATIENCE_SECONDS
        while len(came) < self.cluster.num_machines - 1:
            missing = [machine for machine in range(1, self.cluster.num_machines) if machine not in came]
            for machine in missing:
                if self._store.check([_greeting_key(machine)]):
                    came[machine] = greeting = Greeting(**json.loads(self._store.get(_greeting_key(machine))))
                    self.hosts[machine] = greeting.host
                    _refuse_other(own, greeting)
            self._raise_of_those_who_left()
            if time.monotonic() > deadline:
                self.gone |= dict.fromkeys(missing, "did not come")
                raise RefusedError(self._who_came(missing))
            if time.monotonic() > quiet_until:
                quiet_until = float("inf")
                say(f"waiting for {_machines(missing)} of {self.cluster.num_machines} at port {self.cluster.port}")
            time.sleep(POLL_SECONDS)
        self.interface = interface_of(came[1].reached)

    def speak(self, word: str, **values: Any) -> None:
        """Tell the others what is done, once."""
        if not self._has_spoken:
            self._has_spoken = True
            self._store.set(WORD, json.dumps({"word": word, "hosts": self.hosts, **values}))

    def fail(self, error: BaseException) -> None:
        """Tell the others that there is nothing to come for, unless they have heard what is done."""
        self.speak(FAILED, **told_of(error))

    def _raise_of_those_who_left(self) -> None:
        for told in self.told():
            if told["kind"] == "left":
                raise error_told(told, f"machine {told['machine']} ({told['host']}): ")

    def _who_came(self, missing: list[int]) -> str:
        came = ", ".join(f"{machine} ({host})" for machine, host in sorted(self.hosts.items()))
        return (
            f"of {self.cluster.num_machines} machines came {came}, and {_machines(missing)} did not within {COME_SECONDS:.0f} s: start the same "
            f"command there with --machine-rank {missing[0]}, and see that port {self.cluster.port} of {self.cluster.host} can be reached."
        )

    def wait_for_leaving(self) -> None:
        """Keep the store until the others have left, and no longer than they may need."""
        everybody_came = len(self.hosts) == self.cluster.num_machines
        deadline = time.monotonic() + (LEAVE_SECONDS if everybody_came else LATE_SECONDS)
        while len(self.gone) < self.cluster.num_machines - 1 and time.monotonic() < deadline:
            self.told()
            time.sleep(POLL_SECONDS)

    # --- the others ----------------------------------------------------------------------------------------------------------------

    def greet(self, own: Greeting) -> None:
        """Say what this machine came for.

        Raises:
            RefusedError: another one has its number.
        """
        text = json.dumps(asdict(own))
        first = self._store.compare_set(_greeting_key(own.machine), "", text).decode()
        if first != text:
            raise RefusedError(f"--machine-rank {own.machine}: {json.loads(first)['host']} has come with this number already.")

    def wait_for_word(self, say: Callable[[str], None]) -> Mapping[str, Any]:
        """What machine 0 has decided.

        Raises:
            RlooError: machine 0 failed, or is gone.
        """
        deadline, quiet_until = time.monotonic() + 2 * COME_SECONDS, time.monotonic() + PATIENCE_SECONDS
        while not self._has_word():
            if time.monotonic() > deadline:
                raise LostRankError(f"machine 0 ({self.cluster.host}) said nothing for {2 * COME_SECONDS:.0f} s: its own output tells why.")
            if time.monotonic() > quiet_until:
                quiet_until = float("inf")
                say(f"machine {self.cluster.machine_rank} of {self.cluster.num_machines}: waiting for the others")
            time.sleep(POLL_SECONDS)
        word: Mapping[str, Any] = json.loads(self._store.get(WORD))
        self.hosts = {int(machine): host for machine, host in word["hosts"].items()}
        if word["word"] == FAILED:
            raise error_told(word, f"machine 0 ({self.hosts[0]}): ")
        return word

    def _has_word(self) -> bool:
        try:
            return bool(self._store.check([WORD]))
        except RuntimeError as error:
            raise LostRankError(
                f"machine 0 ({self.cluster.host}) left while this one waited for its word: its own output tells why."
            ) from error


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[Meeting]:
    """The meeting on machine 0, for the block; whatever ends the block is told to the others.

    Raises:
        RefusedError: the port is taken.
    """
    make = _store_class()
    try:
        store = make(LOOPBACK, cluster.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS))
    except RuntimeError as error:
        raise RefusedError(_no_listening(cluster, (str(error).splitlines() or [""])[0])) from error
    with _contact(cluster, LOOPBACK) as contact:
        meeting = Meeting(cluster, store, contact, interface=None)
        with contextlib.ExitStack() as stack:
            stack.callback(meeting.wait_for_leaving)
            stack.push(lambda kind, error, trace: _tell_leaving(contact, error))
            stack.push(lambda kind, error, trace: meeting.fail(error) if error is not None else None)
            yield meeting


def _no_listening(cluster: Cluster, said: str) -> str:
    """What to tell of a port at which torch's store, which `said` so, cannot listen."""
    if "EADDRINUSE" in said:
        return f"port {cluster.port} is already in use on {socket.gethostname()}: give another by --main-process-port, on all machines."
    return (
        f"--main-process-port {cluster.port}: nothing can listen there on {socket.gethostname()} ({said[:160]}): give another one, on all "
        "machines."
    )


@contextlib.contextmanager
def joined(cluster: Cluster, say: Callable[[str], None]) -> Iterator[tuple[Meeting, str]]:
    """(the meeting on a machine other than 0, the address of machine 0 that it reaches), for the block.

    Raises:
        RefusedError: nothing answers where machine 0 should be.
    """
    make = _store_class()
    own, reached = _wait_for_port(cluster, say)
    try:
        store = make(cluster.host, cluster.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    except RuntimeError as error:
        raise RefusedError(f"what answers at {cluster.host}:{cluster.port} is no launcher of rloo: see --main-process-port.") from error
    with _contact(cluster, cluster.host) as contact, contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, trace: _tell_leaving(contact, error))
        yield Meeting(cluster, store, contact, interface=interface_of(own)), reached


def _store_class() -> type[TCPStore]:
    """Torch's store, which does not tell the terminal about hosts whose names it cannot look up."""
    name = "TORCH_CPP_LOG_LEVEL"
    is_asked_for = name in os.environ
    os.environ.setdefault(name, "ERROR")  # read while torch is imported
    from torch.distributed import TCPStore

    if not is_asked_for:
        del os.environ[name]
    return TCPStore


def _wait_for_port(cluster: Cluster, say: Callable[[str], None]) -> tuple[str, str]:
    """(own address, address of machine 0) of a connection to it, once it listens."""
    start = time.monotonic()
    quiet_until, name_until = start + PATIENCE_SECONDS, start + NAME_SECONDS
    while True:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=CONNECT_SECONDS) as connection:
                return str(connection.getsockname()[0]), str(connection.getpeername()[0])
        except (OSError, UnicodeError) as error:
            now, is_name = time.monotonic(), isinstance(error, (socket.gaierror, UnicodeError))
            name_until = name_until if is_name else float("inf")  # a name that was known once may be forgotten for a while
            if now > min(name_until, start + COME_SECONDS) or isinstance(error, UnicodeError):
                raise RefusedError(_no_answer(cluster, error)) from error
        if now > quiet_until:
            quiet_until = float("inf")
            say(f"machine {cluster.machine_rank} of {cluster.num_machines}: waiting for machine 0 at {cluster.host}:{cluster.port}")
        time.sleep(POLL_SECONDS)


def _no_answer(cluster: Cluster, error: OSError | UnicodeError) -> str:
    """What to tell where machine 0 cannot be reached."""
    said = (error.strerror if isinstance(error, OSError) else None) or error
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return (
            f"--main-process-ip {cluster.host}: {socket.gethostname()} knows no machine of that name ({said}): give a name or address by which "
            "the other machines reach machine 0."
        )
    return (
        f"machine 0 did not answer at {cluster.host}:{cluster.port} within {COME_SECONDS:.0f} s ({said}): start the same command there with "
        "--machine-rank 0, or see --main-process-ip and --main-process-port."
    )


def _contact(cluster: Cluster, host: str) -> Contact:
    make = _store_class()
    return Contact(
        lambda: make(host, cluster.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS)),
        machine=cluster.machine_rank,
        num_machines=cluster.num_machines,
    )


def _tell_leaving(contact: Contact, error: BaseException | None) -> None:
    """Tell the others how this launcher ended, and see it on its way."""
    contact.tell("left", host=socket.gethostname(), **told_of(error))
    deadline = time.monotonic() + CONNECT_SECONDS
    while not contact.is_all_sent() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def told_of(error: BaseException | None) -> dict[str, Any]:
    """What another machine is told of an error, for `error_told` there."""
    kind = type(error).__name__ if isinstance(error, RlooError) else ""
    message = error.message if isinstance(error, RlooError) else "" if error is None else f"{type(error).__name__}: {error}"
    return {"code": exit_code_of(error), "error": kind, "message": message}


def error_told(told: Mapping[str, Any], prefix: str) -> RlooError:
    """The same kind of error as it was on another machine."""
    kind = getattr(errors, told["error"], None) if told["error"] else None
    if not (isinstance(kind, type) and issubclass(kind, RlooError)):
        kind = errors.InterruptedTwiceError if told["code"] == errors.InterruptedTwiceError.exit_code else LostRankError
    return kind(f"{prefix}{told['message'] or 'it left without a word'}")


def _refuse_other(own: Greeting, other: Greeting) -> None:
    """Raise RefusedError where a machine came for something else than this one."""
    who = f"machine {other.machine} ({other.host})"
    if other.version != own.version:
        raise RefusedError(f"{who} has {other.version}, and machine 0 ({own.host}) {own.version}: install the same on all machines.")
    if other.num_machines != own.num_machines:
        raise RefusedError(
            f"{who} was told of {other.num_machines} machines, and machine 0 of {own.num_machines}: give all the same command."
        )
    if other.num_processes != own.num_processes:
        seen = f" ({other.gpus} and {own.gpus} GPUs can be seen)" if other.gpus != own.gpus else ""
        raise RefusedError(
            f"{who} counts {other.num_processes} processes on all machines, and machine 0 {own.num_processes}{seen}: all machines start equally "
            "many; give all the same --num-processes."
        )
    changed = _difference(own.recipe, other.recipe)
    if changed:
        raise RefusedError(f"{who} has another recipe than machine 0 ({own.host}): {changed}: give all the same file and options.")


def _difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """`training.seed is 3 there and 4 here`; empty where nothing differs."""
    for section in [*own, *(name for name in other if name not in own)]:
        ours, theirs = own.get(section), other.get(section)
        if not isinstance(ours, dict) or not isinstance(theirs, dict):
            if ours != theirs:
                return f"{section} differs"
            continue
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if ours.get(name) != theirs.get(name):
                return f"{section}.{name} is {theirs.get(name)!r:.80} there and {ours.get(name)!r:.80} here"
    return ""


def _machines(numbers: list[int]) -> str:
    return f"machine{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _greeting_key(machine: int) -> str:
    return f"greeting/{machine}"
