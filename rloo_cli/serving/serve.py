"""From a request to serve a model to a server that was asked to stop: start, readiness, watch, end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rloo_cli.errors import EngineError, InterruptedTwiceError, RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.signals import StopSignal
from rloo_cli.serving import command
from rloo_cli.serving.address import check_free
from rloo_cli.serving.child import Listener, ServerProcess
from rloo_cli.serving.key import Key
from rloo_cli.serving.model_folder import check_model
from rloo_cli.serving.probe import Readiness, one_token
from rloo_cli.serving.server_log import ServerLog, failure, refused_options

POLL_SECONDS = 0.1
PROGRESS_SECONDS = 15.0
LONGEST_START = 3600.0
"""Seconds. Hundreds of gigabytes from a slow disk take half of that."""
LAST_WORDS_SECONDS = 2.0
"""How long a dying server's last lines may take to come."""
RECENT_SECONDS = 20.0
"""Older lines have nothing to do with a death that was just noticed."""
FOLLOW_SECONDS = 5.0
"""How long vLLM may take to notice itself that its engine died."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where the user reads."""

    say: Say
    """Progress and warnings."""
    announce: Say
    """What the user waited for."""


def serve(options: command.ServeOptions, key: Key | None, terminal: Terminal) -> None:
    """Serve until SIGTERM or Ctrl-C; returns when nothing of the server is left.

    Raises:
        RefusedError: the model's folder cannot be served, or vLLM does not take the options.
        EngineError: the port is taken; vLLM did not start, or ended by itself.
        InterruptedTwiceError: a second Ctrl-C; the server was killed.
    """
    version = command.installed_vllm()
    cpu = command.runs_on_cpu()
    check_model(options.model, cpu=cpu, passed_on=options.passed_on)
    check_free(options.address)
    terminal.say(f"starting vLLM {version} for {options.model}; every {PROGRESS_SECONDS:.0f} s a line says how far it is")
    secret = key.value if key is not None else None
    log = ServerLog(secret=secret, level=options.log_level, show=terminal.say)
    argv = command.build_argv(options, cpu=cpu, free_memory=psutil.virtual_memory().available)
    with tempfile.TemporaryDirectory(prefix="rloo-serve-", dir=command.scratch_parent(), ignore_cleanup_errors=True) as scratch:
        added = command.settings(options, cpu=cpu, given=os.environ, scratch=Path(scratch))
        with StopSignal() as stop, _running(ServerProcess(argv, command.environment(os.environ, added, secret)), log) as server:
            ready = Readiness(lambda: one_token(options.address, secret))
            try:
                if _wait_until_ready(server, ready, log, stop, terminal.say):
                    server.remember_workers()
                    announce(options, key, server.listeners(), terminal)
                    _watch(server, log, stop)
            finally:
                ready.stop()
            terminal.say(f"{stop.received}: stopping the server")
    terminal.say("stopped")


@contextmanager
def _running(server: ServerProcess, log: ServerLog) -> Iterator[ServerProcess]:
    """The server with its log followed; ended with all that it started when the block is left, and killed at a second Ctrl-C."""
    assert server.process.stdout is not None
    log.follow(server.process.stdout)
    try:
        try:
            yield server
        finally:
            log.quiet()
            left = server.stop()
    except InterruptedTwiceError:
        left = server.stop(seconds=0)
        raise InterruptedTwiceError("interrupted twice: the server was killed.") from None
    finally:
        log.finish(LAST_WORDS_SECONDS)
        server.process.stdout.close()
    if left:
        raise EngineError(f"processes of the server could not be ended: {', '.join(map(str, left))} (stuck in a driver?)")


def _wait_until_ready(server: ServerProcess, readiness: Readiness, log: ServerLog, stop: StopSignal, say: Say) -> bool:
    """Whether it generates; False when a signal came first."""
    started = told = time.monotonic()
    while not readiness.ready.wait(POLL_SECONDS):
        if stop.received is not None:
            return False
        if server.exit_code is not None:
            raise _death(server, log, started=False)
        now = time.monotonic()
        if now - started > LONGEST_START:
            raise EngineError(f"vLLM did not generate a token within {LONGEST_START:.0f} s: {readiness.answer}.{_keep(log)}")
        if now - told >= PROGRESS_SECONDS:
            told = now
            say(f"starting for {now - started:.0f} s: {log.last_news() or 'no word from vLLM yet'}")
    say(f"ready after {time.monotonic() - started:.0f} s")
    return True


def _watch(server: ServerProcess, log: ServerLog, stop: StopSignal) -> None:
    """Return when a signal asks for the end; raise EngineError when the server, or a process of its engine, ends by itself."""
    while stop.received is None:
        time.sleep(POLL_SECONDS)
        if server.exit_code is not None:
            raise _death(server, log, started=True)
        if lost := server.lost_worker():
            deadline = time.monotonic() + FOLLOW_SECONDS
            while server.exit_code is None and stop.received is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if stop.received is None:
                raise _death(server, log, started=True, lost=lost)


def _death(server: ServerProcess, log: ServerLog, *, started: bool, lost: str | None = None) -> EngineError | RefusedError:
    """The error that tells why the server is no more."""
    log.finish(LAST_WORDS_SECONDS)
    lines = log.lines(seconds=RECENT_SECONDS if started else None)
    code = server.exit_code or 0
    if not started and (refused := refused_options(lines)) is not None:
        return refused
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    what = f"{lost}, a process of vLLM's engine, died" if lost else f"vLLM ended {'by itself' if started else 'while starting'} ({how})"
    return failure(lines, what=what, where=_keep(log), started=started)


def _keep(log: ServerLog) -> str:
    """Where the whole log is, after it was written there; empty when there is none, or no room for it."""
    path = Path(tempfile.gettempdir()) / f"rloo-vllm-serve-{os.getpid()}.log"
    try:
        if lines := log.lines():
            atomic.write_file(path, "\n".join(lines) + "\n")
            return f" What it said: {path}"
    except StorageError:
        pass  # a full disk must not hide why the server died
    return ""


def announce(options: command.ServeOptions, key: Key | None, listeners: list[Listener], terminal: Terminal) -> None:
    """Tell where the server is, what goes into the recipe, and what else listens."""
    terminal.announce(f"{options.address.url} serves {options.model}. In the recipe:\n\n{recipe_lines(options, key)}\n")
    others = [one for one in listeners if not one.is_loopback and one.port != options.address.port]
    if others:
        told = ", ".join(f"{one.host}:{one.port} ({one.process})" for one in others)
        terminal.say(
            f"warning: listens beyond this machine, without a key: {told}. docs/security.md says why; a firewall keeps others out."
        )
    if key is None:
        terminal.say("no key: every program of this machine can use the server. --key-file FILE makes one.")
    elif key.file is None:
        terminal.say(f"the key: trainers take it from {command.KEY_VARIABLE} in their environment, or from a file, vllm_server_key_file")


def recipe_lines(options: command.ServeOptions, key: Key | None) -> str:
    """The section of a recipe that trains with this server."""
    lines = ["generation:", "  use_vllm: true", "  vllm_mode: server", f"  vllm_server_base_url: {options.address.url}"]
    if key is not None and key.file is not None:
        lines.append(f"  vllm_server_key_file: {key.file}")
    return "\n".join(lines)
