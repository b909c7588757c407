"""The trainer's side of the workers: starts the fork server, hands out requests, tells what came back or died. Never waits unasked."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError, RewardError
from rloo_cli.rewards.modules import PACKAGE_ROOT
from rloo_cli.rewards.protocol import Channel, encode

LOGGER = logging.getLogger(__name__)

BOOT = "import sys; sys.path.append(sys.argv.pop()); from rloo_cli.rewards.forkserver import main; main(int(sys.argv.pop()))"
POLL_SECONDS = 0.05
"""How often a waiting trainer looks for a stop signal."""
CLOSE_SECONDS = 10.0
MOST_STILLBORN = 5
"""Workers in a row that die before they are ready: then something is wrong with all of them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A worker process, as the trainer sees it."""

    number: int
    """Unique over the run."""
    slot: int
    """Its place, from 0; a replacement takes it over, and its log file."""
    channel: Channel
    is_ready: bool = False
    is_fresh: bool = True
    """Whether it was never given anything to do."""
    jobs: deque[Any] = field(default_factory=deque)
    """What it works at, and what it has been given beyond that; empty = idle."""
    deadline: float = float("inf")
    """For its next answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An answer of a worker, or its end."""

    worker: Worker
    answer: dict[str, Any] | None
    """None: it died or was too late, and a new worker has its place."""
    reason: str | None = None
    """How it died; None where it was too late."""


class WorkerPool:
    """Workers in `num_workers` slots, each killable at any time."""

    def __init__(
        self,
        *,
        functions: Sequence[Mapping[str, Any]],
        path: Sequence[str],
        environment: Mapping[str, str],
        num_workers: int,
        log_dir: Path | None,
        memory_limit: int,
        load_timeout: float,
    ) -> None:
        self.workers: list[Worker] = []
        self._functions = functions
        self._environment = environment
        self._num_workers = num_workers
        self._load_timeout = load_timeout
        self._config: dict[str, Any] = {
            "functions": [dict(function) for function in functions],
            "path": list(path),
            "folder": str(Path.cwd()),
            "log_dir": str(log_dir) if log_dir is not None else None,
            "memory_limit": memory_limit,
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._selector = selectors.DefaultSelector()
        self._next_number = 0
        self._stillborn = 0
        self._closes_itself = False

    def start(self, check_stop: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        """What `forkserver.describe` tells of each function, once every worker is ready.

        Raises:
            RecipeError: a function cannot be imported, or its import does not end.
        """
        told = self._launch(preload=True, check_stop=check_stop)
        if told["threads"] > 1:
            LOGGER.info("importing the reward functions starts threads: each worker imports them for itself")
            self._stop_server()
            self._launch(preload=False, check_stop=check_stop)
        for slot in range(self._num_workers):
            self.workers.append(self._fork(slot))
        deadline = time.monotonic() + self._load_timeout
        while not all(worker.is_ready for worker in self.workers):
            self._call(check_stop)
            if time.monotonic() > deadline:
                raise RecipeError(f"reward workers were not ready within {self._load_timeout:g} s")
            self.wait(POLL_SECONDS)
        loaded: list[dict[str, Any]] = told["loaded"]
        return loaded

    def send(self, worker: Worker, job: Any, request: bytes, seconds: float) -> None:
        """Give a worker something to do; the first answer of an idle one is due within `seconds`."""
        if not worker.jobs:
            worker.deadline = time.monotonic() + seconds
        worker.jobs.append(job)
        worker.is_fresh = False
        worker.channel.send(request)
        if worker.channel.has_unsent:
            self._selector.modify(worker.channel.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def wait(self, timeout: float) -> list[Event]:
        """What happened until now, or within `timeout` seconds if nothing has. A worker behind its deadline is killed."""
        events: list[Event] = []
        nearest = min((worker.deadline for worker in self.workers), default=float("inf")) - time.monotonic()
        for key, mask in self._selector.select(max(0.0, min(timeout, nearest))):
            if key.data is None:
                events += self._hear_server()
            elif key.data in self.workers:
                events += self._hear(key.data, mask)
        now = time.monotonic()  # after what has arrived was read: an answer in time counts, however late the trainer looks
        for worker in [worker for worker in self.workers if worker.deadline < now]:
            self._control_send({"kill": worker.number})
            events += self._bury(worker, None)
        return events

    def replace(self, worker: Worker) -> None:
        """Put a new worker in the place of this one, which is killed with everything it started."""
        self._control_send({"kill": worker.number})
        self._succeed(worker)

    def close(self) -> None:
        """End the server and with it all workers; safe to call twice."""
        for worker in self.workers:
            self._forget(worker)
        self.workers = []
        self._stop_server()

    def _launch(self, *, preload: bool, check_stop: Callable[[], None] | None) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), PACKAGE_ROOT]
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(self._environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer to answer
            )
        self._control = Channel(ours)
        self._closes_itself = False
        self._control.send(encode({**self._config, "preload": preload}))
        self._selector.register(ours, selectors.EVENT_READ, None)
        told = self._await_import(check_stop)
        self._closes_itself = True
        return told

    def _await_import(self, check_stop: Callable[[], None] | None) -> dict[str, Any]:
        control, deadline, importing = self._control, time.monotonic() + self._load_timeout, None
        assert control is not None
        while True:
            self._call(check_stop)
            self._selector.select(POLL_SECONDS)
            for message in control.receive():
                if "loading" in message:
                    importing = self._functions[message["loading"]]
                elif "failed" in message:
                    raise RecipeError(self._import_failed(message))
                elif "loaded" in message:
                    return dict(message)
            what = f"importing `{importing['module']}`" if importing else "the process that imports reward functions"
            if not control.is_open:
                raise RecipeError(f"{what} ended its process: {self._server_end()}")
            if time.monotonic() > deadline:
                raise RecipeError(
                    f"{what} took longer than {self._load_timeout:g} s; do slow work at the first call, not when the module is imported"
                )

    def _import_failed(self, message: Mapping[str, Any]) -> str:
        function = self._functions[message["failed"]]
        LOGGER.error("importing %s failed\n%s", function["module"], message["traceback"])
        return f"importing `{function['module']}` for the reward `{function['name']}` failed: {message['error']}"

    def _fork(self, slot: int) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            worker = Worker(number=self._next_number, slot=slot, channel=Channel(ours), deadline=time.monotonic() + self._load_timeout)
            self._next_number += 1
            self._selector.register(ours, selectors.EVENT_READ, worker)
            self._control_send({"fork": worker.number, "log": slot}, theirs.fileno())
        return worker

    def _control_send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        assert self._control is not None
        connection = self._control.connection
        connection.setblocking(True)  # a few bytes to a process that always reads
        try:
            socket.send_fds(connection, [encode(message)], [] if descriptor is None else [descriptor])
        except OSError as error:
            raise RewardError(f"the process that forks reward workers ended: {self._server_end()}") from error
        finally:
            connection.setblocking(False)

    def _hear_server(self) -> list[Event]:
        assert self._control is not None
        events = []
        for message in self._control.receive():
            worker = next((w for w in self.workers if w.number == message.get("exited")), None)
            if worker is not None:
                events += self._hear(worker, selectors.EVENT_READ)  # what it said before it died
                events += self._bury(worker, status_words(message["status"])) if worker in self.workers else []
        if not self._control.is_open:
            raise RewardError(f"the process that forks reward workers ended: {self._server_end()}")
        return events

    def _hear(self, worker: Worker, mask: int) -> list[Event]:
        if mask & selectors.EVENT_WRITE:
            worker.channel.flush()
            if not worker.channel.has_unsent:
                self._selector.modify(worker.channel.connection, selectors.EVENT_READ, worker)
        if not worker.channel.is_open:
            return []
        messages = worker.channel.receive()
        if not worker.channel.is_open:
            self._selector.unregister(worker.channel.connection)  # the server tells how it ended
        events = self._read(worker, messages)
        if worker.channel.fault is not None:
            self._control_send({"kill": worker.number})
            events += self._bury(worker, f"it sent {worker.channel.fault}")
        return events

    def _read(self, worker: Worker, messages: Sequence[Mapping[str, Any]]) -> list[Event]:
        events = []
        for message in messages:
            if message.get("ready"):
                worker.is_ready, worker.deadline, self._stillborn = True, float("inf"), 0
            elif worker.is_ready:
                worker.deadline = float("inf")  # until whoever takes the answer sets the next
                events.append(Event(worker=worker, answer=dict(message)))
            elif "failed" in message:
                LOGGER.error("%s", self._import_failed(message))
        return events

    def _bury(self, worker: Worker, reason: str | None) -> list[Event]:
        """Replace a dead worker; the event that says so, if it had a job."""
        if not worker.is_ready:
            self._stillborn += 1
            if self._stillborn >= MOST_STILLBORN:
                raise RewardError(f"{self._stillborn} reward workers in a row ended before they were ready: {reason or 'too late'}")
        elif not worker.jobs:
            LOGGER.warning("an idle reward worker died (%s) and was replaced", reason)
        self._succeed(worker)
        return [Event(worker=worker, answer=None, reason=reason)] if worker.jobs else []

    def _succeed(self, worker: Worker) -> None:
        self._forget(worker)
        self.workers[self.workers.index(worker)] = self._fork(worker.slot)

    def _forget(self, worker: Worker) -> None:
        if worker.channel.connection in self._selector.get_map():
            self._selector.unregister(worker.channel.connection)
        worker.channel.close()

    def _stop_server(self) -> None:
        if self._control is not None:
            if self._control.connection in self._selector.get_map():
                self._selector.unregister(self._control.connection)
            self._control.close()
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(CLOSE_SECONDS if self._closes_itself else 0)
            except subprocess.TimeoutExpired:
                os.killpg(self._server.pid, signal.SIGKILL)
                self._server.wait()
            self._server = None

    def _server_end(self) -> str:
        assert self._server is not None
        try:
            return status_words(self._server.wait(1.0))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    @staticmethod
    def _call(check_stop: Callable[[], None] | None) -> None:
        if check_stop is not None:
            check_stop()


def status_words(status: int) -> str:
    """`signal 11 (SIGSEGV)` or `exit code 3`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
