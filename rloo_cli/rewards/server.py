"""The trainer's end of the fork server: its process, its connection, how it ended."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rloo_cli.rewards.modules import PACKAGE_ROOT
from rloo_cli.rewards.processes import end_tree
from rloo_cli.rewards.protocol import Channel, encode

BOOT = "import sys; sys.path.append(sys.argv.pop()); from rloo_cli.rewards.forkserver import main; main(int(sys.argv.pop()))"
CLOSE_SECONDS = 10.0
"""For ending its workers, once it was told to."""
SEND_SECONDS = 10.0
"""For taking a message: it always reads, unless somebody stopped it."""


class ServerProcess:
    """A running fork server. A new interpreter, not a fork of the trainer: torch's threads do not matter."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), PACKAGE_ROOT]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer to answer
            )
        self.channel = Channel(ours)
        self.is_serving = False
        """Whether it has imported what it imports and answers at once."""
        self.send(config)

    @property
    def connection(self) -> socket.socket:
        """To wait on; readable when it has something to say, or has ended."""
        return self.channel.connection

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Tell it something, with a file descriptor if there is one. Its end shows in `channel`, not here."""
        body = encode(message)
        self.connection.settimeout(SEND_SECONDS)
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self.connection, [body], [] if descriptor is None else [descriptor])
            self.connection.sendall(body[sent:])
        self.connection.setblocking(False)

    def kill(self) -> None:
        """End it at once, and all that it started."""
        end_tree(self._process.pid)

    def end_words(self) -> str:
        """How it ended, its connection being closed."""
        try:
            return status_words(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def close(self) -> None:
        """Hang up, and see to it that it ends."""
        self.channel.close()
        try:
            self._process.wait(CLOSE_SECONDS if self.is_serving else 0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def status_words(status: int) -> str:
    """`signal 11 (SIGSEGV)` or `exit code 3`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
