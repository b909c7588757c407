from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from rloo_cli.errors import EngineError, InterruptedTwiceError
from rloo_cli.run.signals import StopSignal
from rloo_cli.serving.child import ServerProcess
from rloo_cli.serving.serve import _running, _watch
from rloo_cli.serving.server_log import ServerLog

RENAME = "import ctypes; ctypes.CDLL(None).prctl(15, b'VLLM::Engine', 0, 0, 0)"
SLEEP = "import time; print('up', flush=True); time.sleep(100)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


def server(code, *arguments):
    return ServerProcess([sys.executable, "-c", textwrap.dedent(code), *arguments], os.environ)


def started(code, *arguments):
    there = server(code, *arguments)
    assert there.process.stdout.readline() == b"up\n"
    return there


def log():
    return ServerLog(secret=None, level="error", show=print)


def test_one_that_leaves_when_asked_is_not_killed():
    there = started(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("up", flush=True)
        time.sleep(100)
        """
    )
    assert there.stop() == []
    assert there.exit_code == 7


def test_one_that_does_not_listen_is_killed_with_its_family():
    there = started(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); {STUBBORN}")
    family = there.family()
    assert len(family) == 2
    begun = time.monotonic()
    assert there.stop(seconds=0.5) == []
    assert time.monotonic() - begun < 10
    assert there.exit_code == -signal.SIGKILL
    assert there.family() == []


def test_what_a_dead_server_leaves_behind_is_found_and_ended():
    there = started(
        """
        import os, time
        if os.fork() == 0:
            time.sleep(100)
        print("up", flush=True)
        time.sleep(0.5)
        """
    )
    there.process.wait(10)
    (orphan,) = there.family()
    assert orphan.ppid() == os.getpid()
    assert there.stop() == []
    assert not psutil.pid_exists(orphan.pid)


def test_a_server_dies_with_the_command():
    script = f"""
    import os, sys, time
    from rloo_cli.serving.child import ServerProcess
    there = ServerProcess([sys.executable, "-c", {SLEEP!r}], os.environ)
    there.process.stdout.readline()
    print(there.process.pid, flush=True)
    time.sleep(100)
    """
    command = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(command.stdout.readline()))
    command.kill()
    command.wait()
    command.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_where_it_listens_is_told():
    code = "import socket, time; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_server(('', 0)); print('up', flush=True); time.sleep(100)"
    there = started(code)
    assert sorted(one.is_loopback for one in there.listeners()) == [False, True]
    there.stop(seconds=0)


def test_a_lost_worker_is_noticed_and_named():
    there = started(
        f"""
        import os, time
        if os.fork() == 0:
            {RENAME}
            time.sleep(100)
        print("up", flush=True)
        time.sleep(100)
        """
    )
    wait_until(lambda: any(member.name() == "VLLM::Engine" for member in there.family()))
    there.remember_workers()
    assert there.lost_worker() is None
    (worker,) = [member for member in there.family() if member.name() == "VLLM::Engine"]
    worker.kill()
    wait_until(lambda: there.lost_worker() is not None)
    assert there.lost_worker() == f"VLLM::Engine (pid {worker.pid})"
    there.stop(seconds=0)


def test_a_server_without_its_engine_is_not_waited_for():
    there = started(
        f"""
        import os, signal, time
        if os.fork() == 0:
            {RENAME}
            time.sleep(100)
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGUSR1))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        print("up", flush=True)
        while True:
            time.sleep(1)
        """
    )
    wait_until(lambda: any(member.name() == "VLLM::Engine" for member in there.family()))
    there.remember_workers()
    begun = time.monotonic()
    assert there.stop(seconds=60) == []
    assert time.monotonic() - begun < 20


def test_the_end_of_a_server_that_was_ready_is_an_error_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    there, kept = server("import time; time.sleep(0.3); raise ValueError('the engine broke')"), log()
    with StopSignal() as stop, pytest.raises(EngineError) as raised, _running(there, kept):
        _watch(there, kept, stop)
    told = f"vLLM ended by itself (exit code 1): ValueError: the engine broke. What it said: {tmp_path}/rloo-vllm-serve-{os.getpid()}.log"
    assert raised.value.message == told
    assert "Traceback" in (tmp_path / f"rloo-vllm-serve-{os.getpid()}.log").read_text()


def test_a_second_ctrl_c_kills_while_the_first_is_still_waiting():
    there = started(STUBBORN)
    begun = time.monotonic()
    twice = f"import os, time\nfor pause in (0.2, 1.5): time.sleep(pause); os.kill({os.getpid()}, {signal.SIGINT:d})"
    with pytest.raises(InterruptedTwiceError, match="was killed"), StopSignal() as stop, _running(there, log()):
        wait_for_signal(twice, stop)
    assert time.monotonic() - begun < 12
    assert there.exit_code == -signal.SIGKILL


def wait_for_signal(code, stop):
    subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: stop.received == "SIGINT")


def test_a_taken_port_is_free_again_when_it_has_stopped():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = f"import socket, time; a = socket.create_server(('127.0.0.1', {port})); print('up', flush=True); time.sleep(100)"
    there = started(code)
    there.stop()
    socket.create_server(("127.0.0.1", port)).close()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)
