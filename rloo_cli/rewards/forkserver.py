"""The process that forks workers and buries them. Started before torch is imported; single-threaded, so that a fork is safe at any time.

It imports the reward functions once; workers are then copies that are ready within milliseconds. Where an import starts threads,
the trainer starts it again with `preload` off and each worker imports for itself. Every worker leads a session of its own;
when it ends, or the trainer asks for its end, everything that came of it is killed. When the trainer goes, all of them go.

A worker that holds, with its children, more memory than it may is killed, too: a limit of the kernel's is for one process, and does not
count memory that processes share.

    from the trainer   {"fork": id, "log": 0} with a socket, {"kill": id}
    to the trainer     {"loading": k}, {"failed": k, …}, {"loaded": […], "threads": 1}, {"exited": id, "status": -11, "reason": null}
"""

from __future__ import annotations

import asyncio  # noqa: F401 - imported before the fork, not in each worker
import contextlib
import gc
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rloo_cli.rewards import calls, processes, worker
from rloo_cli.rewards.calls import LoadedReward
from rloo_cli.rewards.memory import fair_held_by_family, held_by_family
from rloo_cli.rewards.output import OutputFile
from rloo_cli.rewards.protocol import encode, read_message, read_message_with_fd

WATCH_SECONDS = 0.25
"""How often the memory of the workers is looked at."""


def main(descriptor: int) -> None:
    """Serve the trainer at the other end of this socket."""
    connection = socket.socket(fileno=descriptor)
    processes.leave_signals_to_the_trainer()
    processes.adopt_orphans()
    config = read_message(connection)
    if config is None:
        return
    sys.path[:] = config["path"]
    processes.limit_memory(config["memory_limit"])
    rewards = worker.load_rewards(connection, config["functions"]) if config["preload"] else None
    told = [calls.describe(reward) for reward in rewards.values()] if rewards is not None else None
    connection.sendall(encode({"loaded": told, "threads": processes.thread_count()}))
    gc.freeze()  # a collection in a worker would otherwise copy every page that is shared with us
    ForkServer(connection, config, rewards).serve()
    os._exit(0)  # the exit handlers of the user's modules have no time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A worker that was not buried yet."""

    worker: int
    pid: int
    pidfd: int


class ForkServer:
    """Forks, watches and ends workers."""

    def __init__(self, connection: socket.socket, config: Mapping[str, Any], rewards: Mapping[int, LoadedReward] | None) -> None:
        self.connection = connection
        self.config = config
        self.rewards = rewards
        self.children: dict[int, Child] = {}
        self.outputs: dict[int, OutputFile] = {}
        self.older = processes.children()
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ, "trainer")
        self.trainer = os.pidfd_open(os.getppid())
        self.selector.register(self.trainer, selectors.EVENT_READ, "gone")
        self.next_watch = 0.0

    def serve(self) -> None:
        """Serve until the trainer hangs up or dies."""
        while True:
            for key, _ in self.selector.select(WATCH_SECONDS if self.children else None):
                if isinstance(key.data, OutputFile):
                    self._drain(key.data, key.fd)
                elif isinstance(key.data, Child):
                    self._bury(key.data)
                elif key.data == "gone" or not self._obey():
                    self._end_all()
                    return
            if time.monotonic() >= self.next_watch:
                self._watch_memory()
                self.next_watch = time.monotonic() + WATCH_SECONDS

    def _obey(self) -> bool:
        message, descriptor = read_message_with_fd(self.connection)
        if message is None:
            return False
        if "fork" in message and descriptor is not None:
            self._fork(message["fork"], message["log"], socket.socket(fileno=descriptor))
        for child in [child for child in self.children.values() if child.worker == message.get("kill")]:
            self._bury(child)
        return True

    def _fork(self, number: int, log: int, connection: socket.socket) -> None:
        output = self._output(log)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, output, parent)
        connection.close()
        os.close(output)
        child = Child(worker=number, pid=pid, pidfd=os.pidfd_open(pid))
        self.children[number] = child
        self.selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _become_worker(self, connection: socket.socket, output: int, parent: int) -> NoReturn:
        for descriptor in [key.fd for key in self.selector.get_map().values()]:
            os.close(descriptor)
        self.selector.close()
        worker.run(connection, self.rewards, self.config, output, parent)

    def _output(self, log: int) -> int:
        """A descriptor to write to: a pipe to the worker's log, which is capped here, or nowhere."""
        if self.config["log_dir"] is None:
            return os.open(os.devnull, os.O_WRONLY)
        if log not in self.outputs:
            self.outputs[log] = OutputFile(os.path.join(self.config["log_dir"], f"reward-worker-{log}.log"))  # noqa: PTH118
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.selector.register(reading, selectors.EVENT_READ, self.outputs[log])
        return writing

    def _drain(self, output: OutputFile, descriptor: int) -> None:
        if not output.take(descriptor):
            self.selector.unregister(descriptor)
            os.close(descriptor)

    def _watch_memory(self) -> None:
        limit = self.config["memory_limit"]
        for child in list(self.children.values()):
            if held_by_family(child.pid) > limit and (held := fair_held_by_family(child.pid)) > limit:
                self._bury(child, f"it and its children held {held / 2**30:.1f} GiB of memory, and may hold {limit / 2**30:.1f}")

    def _bury(self, child: Child, reason: str | None = None) -> None:
        if self.children.pop(child.worker, None) is None:
            return  # it ended by itself at the moment when the trainer asked for it
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        known = self.older | {other.pid for other in self.children.values()}
        status = processes.end_family(child.pid, known=known)
        with contextlib.suppress(OSError):
            self.connection.sendall(encode({"exited": child.worker, "status": os.waitstatus_to_exitcode(status), "reason": reason}))

    def _end_all(self) -> None:
        for child in list(self.children.values()):
            self._bury(child)
        processes.end_children()
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, OutputFile):
                self._drain(key.data, key.fd)
