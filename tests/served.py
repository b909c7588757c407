"""`rloo vllm-serve` as a process, for tests: started, waited for, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
KEY = "a-key-that-only-tests-know"
SMALL = ("--dtype", "float32", "--max-model-len", "256")
SMALL_CACHE = ("--", "--kv-cache-memory-bytes", str(64 << 20))
START_SECONDS = 240.0
"""A machine that many share takes minutes for what takes 20 s alone."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A running command. `wait_for` a text, `end` it, ask for its `family`."""

    def __init__(self, folder, model, *arguments, key=None, passed_on=SMALL_CACHE, port=None, environment=None):
        self.port = port or free_port()
        self.key = key
        self._output = folder / f"serve-{self.port}.out"
        given = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "TMPDIR": str(folder), **(environment or {})}
        given.pop("RLOO_VLLM_KEY", None)
        if key is not None:
            given["RLOO_VLLM_KEY"] = key
        command = [sys.executable, "-m", "rloo_cli", "vllm-serve", "--model", str(model), "--port", str(self.port)]
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *SMALL, *arguments, *passed_on], cwd=ROOT, env=given, stdout=file, stderr=subprocess.STDOUT
            )
        self._family = {}

    @property
    def output(self):
        return self._output.read_text(errors="replace")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, text, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.output[-2000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {seconds} s: {self.output[-2000:]}"
            time.sleep(0.1)
        self.family()

    def wait_until_ready(self):
        self.wait_for("In the recipe:")
        return self

    def family(self):
        """The command, vLLM and its workers, as far as they live; also those that were seen before."""
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.process.pid)
            for member in (command, *command.children(recursive=True)):
                self._family.setdefault(member.pid, member)
        return [member for member in self._family.values() if _lives(member)]

    def workers(self):
        """The processes of vLLM's engine, the engine's core first."""
        return sorted((member for member in self.family() if member.name().startswith("VLLM::")), key=lambda member: member.name())

    def listeners(self):
        """(address, port, process) of every socket on which one of them takes connections."""
        return [
            (connection.laddr.ip, connection.laddr.port, member.name())
            for member in self.family()
            for connection in member.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]

    def end(self, number=signal.SIGTERM, seconds=40.0):
        """The exit code after a signal."""
        self.family()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self):
        """Leave nothing behind, whatever happened."""
        left = self.family()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.end()
        for member in left:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self.process.wait()


def _lives(member):
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def serving(*arguments, **options):
    """A command that is ended with all that it started."""
    served = Served(*arguments, **options)
    try:
        yield served
    finally:
        served.close()
