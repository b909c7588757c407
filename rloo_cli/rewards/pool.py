"""The trainer's side of the workers: starts the fork server, hands out requests, tells what came back or died. Never waits unasked."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError, RewardError
from rloo_cli.rewards.processes import end_sessions
from rloo_cli.rewards.protocol import Channel
from rloo_cli.rewards.server import ServerProcess, status_words

LOGGER = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often a waiting trainer looks for a stop signal."""
READY_SECONDS = 20.0
"""For a worker that need not import anything, which takes milliseconds; behind it the fork server does not answer."""
MOST_DEATHS = 3
"""Ends of the fork server without an answer of a worker in between."""
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
    """For its next answer, or for being ready."""
    pid: int = 0
    """Once it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An answer of a worker, or its end."""

    worker: Worker
    answer: dict[str, Any] | None
    """None: it died or was too late, and a new worker has its place."""
    reason: str | None = None
    """How it died; None where it was too late."""
    is_shared: bool = False
    """Whether other workers died in the middle of their work by the same cause, so that nobody knows whose fault it was."""


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
            "preload": True,
        }
        self._server: ServerProcess | None = None
        self._selector = selectors.DefaultSelector()
        self._next_number = 0
        self._stillborn = 0
        self._deaths = 0

    def start(self, check_stop: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        """What `forkserver.describe` tells of each function, once every worker is ready.

        Raises:
            RecipeError: a function cannot be imported, or its import does not end.
        """
        told = self._import_in_server(check_stop)
        if told["threads"] > 1:
            LOGGER.info("importing the reward functions starts threads: each worker imports them for itself")
            self._stop_server()
            self._config["preload"] = False
            self._import_in_server(check_stop)
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
        """What happened until now, or within `timeout` seconds if nothing has. A worker behind its deadline is killed.

        Raises:
            RewardError: the process that forks workers ends again and again.
        """
        events: list[Event] = []
        nearest = min((worker.deadline for worker in self.workers), default=float("inf")) - time.monotonic()
        for key, mask in self._selector.select(max(0.0, min(timeout, nearest))):
            if key.data is None:
                events += self._hear_server()
            elif key.data in self.workers:
                events += self._hear(key.data, mask)
        now = time.monotonic()  # after what has arrived was read: an answer in time counts, however late the trainer looks
        for worker in [worker for worker in self.workers if worker.deadline < now]:
            if worker.is_ready:
                self._tell_server({"kill": worker.number})
                events += self._bury(worker, None)
            else:  # it is the server that hangs: its end is noticed by the next wait, like any other
                worker.deadline = float("inf")
                self._kill_server()
        return events

    def replace(self, worker: Worker) -> None:
        """Put a new worker in the place of this one, which is killed with everything it started."""
        self._tell_server({"kill": worker.number})
        self._succeed(worker)

    def close(self) -> None:
        """End the server and with it all workers; safe to call twice."""
        for worker in self.workers:
            self._forget(worker)
        self.workers = []
        self._stop_server()

    def _launch(self) -> ServerProcess:
        server = ServerProcess(self._config, self._environment)
        self._selector.register(server.connection, selectors.EVENT_READ, None)
        self._server = server
        return server

    def _import_in_server(self, check_stop: Callable[[], None] | None) -> dict[str, Any]:
        server, deadline, importing = self._launch(), time.monotonic() + self._load_timeout, None
        while True:
            self._call(check_stop)
            self._selector.select(POLL_SECONDS)
            for message in server.channel.receive():
                if "loading" in message:
                    importing = self._functions[message["loading"]]
                elif "failed" in message:
                    raise RecipeError(self._import_failed(message))
                elif "loaded" in message:
                    server.is_serving = True
                    return dict(message)
            what = f"importing `{importing['module']}`" if importing else "the process that imports reward functions"
            if not server.channel.is_open:
                raise RecipeError(f"{what} ended its process: {server.end_words()}")
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
            worker = Worker(number=self._next_number, slot=slot, channel=Channel(ours), deadline=self._ready_deadline())
            self._next_number += 1
            self._selector.register(ours, selectors.EVENT_READ, worker)
            self._tell_server({"fork": worker.number, "log": slot}, theirs.fileno())
        return worker

    def _tell_server(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        assert self._server is not None
        self._server.send(message, descriptor)

    def _kill_server(self) -> None:
        assert self._server is not None
        self._server.kill()

    def _hear_server(self) -> list[Event]:
        server = self._server
        assert server is not None
        events = []
        for message in server.channel.receive():
            if "failed" in message:
                raise RewardError(self._import_failed(message))
            if "loaded" in message:
                self._begin_to_serve(server)
            worker = next((w for w in self.workers if w.number == message.get("exited")), None)
            if worker is not None:
                events += self._hear(worker, selectors.EVENT_READ)  # what it said before it died
                reason = message.get("reason") or status_words(message["status"])
                events += self._bury(worker, reason) if worker in self.workers else []
        return events if server.channel.is_open else events + self._start_anew(server)

    def _ready_deadline(self) -> float:
        imports_first = not self._config["preload"] or self._server is None or not self._server.is_serving
        return time.monotonic() + (self._load_timeout if imports_first else min(READY_SECONDS, self._load_timeout))

    def _begin_to_serve(self, server: ServerProcess) -> None:
        server.is_serving = True
        for worker in self.workers:
            if not worker.is_ready:
                worker.deadline = self._ready_deadline()

    def _start_anew(self, server: ServerProcess) -> list[Event]:
        """Put another server in the place of one that ended, and with it its workers; the events of those that had a job."""
        events = [event for worker in list(self.workers) for event in self._hear(worker, selectors.EVENT_READ)]
        reason = f"the process that forks reward workers ended: {server.end_words()}"
        self._deaths += 1
        if self._deaths > MOST_DEATHS:
            raise RewardError(f"{reason}, {self._deaths} times and without an answer of a worker in between; see the log of the run")
        LOGGER.warning("%s; another one is started", reason)
        self._stop_server()
        end_sessions({worker.pid for worker in self.workers if worker.pid})
        self._launch()
        busy = [worker for worker in self.workers if worker.jobs]
        for worker in list(self.workers):
            self._succeed(worker)
        return events + [Event(worker=worker, answer=None, reason=reason, is_shared=len(busy) > 1) for worker in busy]

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
            self._tell_server({"kill": worker.number})
            events += self._bury(worker, f"it sent {worker.channel.fault}")
        return events

    def _read(self, worker: Worker, messages: Sequence[Mapping[str, Any]]) -> list[Event]:
        events = []
        for message in messages:
            if message.get("ready"):
                worker.is_ready, worker.deadline, self._stillborn = True, float("inf"), 0
                worker.pid = message["pid"]
            elif worker.is_ready:
                self._deaths = 0
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
        if self._server is not None:
            if self._server.connection in self._selector.get_map():
                self._selector.unregister(self._server.connection)
            self._server.close()
            self._server = None

    @staticmethod
    def _call(check_stop: Callable[[], None] | None) -> None:
        if check_stop is not None:
            check_stop()
