from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rloo_cli.errors import InterruptedTwiceError
from rloo_cli.run.signals import StopRequested, StopSignal


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_is_remembered_and_raised_where_asked(name, request):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may have it ignored, as nohup does
    request.addfinalizer(lambda: signal.signal(number, before))
    with StopSignal() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.received == name
        with pytest.raises(StopRequested, match=name):
            stop.check()


def test_the_first_signal_counts():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGTERM"


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_leaves_at_once():
    left = []
    with StopSignal(leave=lambda: left.append(1), grace_seconds=60) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(InterruptedTwiceError) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.value.exit_code == 130
        assert stop.received == "SIGINT"
        assert left == []
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [1]


def signalled(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def answered(number):
    try:
        signalled(number)
    except Exception:  # noqa: BLE001 - as libraries do around optional imports
        pytest.fail("the stop was taken for a failure")


def test_where_nothing_can_be_lost_a_signal_stops_at_once():
    with StopSignal() as stop:
        with pytest.raises(StopRequested, match="SIGUSR1"), stop.at_once():
            signalled(signal.SIGUSR1)
        with pytest.raises(StopRequested, match="SIGUSR1"), stop.at_once():  # a signal that came before the block
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGTERM)  # after the block, a signal only sets the flag
        assert stop.received == "SIGUSR1"


def test_a_stop_is_no_exception_that_a_library_would_answer():
    with StopSignal() as stop, pytest.raises(StopRequested), stop.at_once():
        answered(signal.SIGTERM)


def test_outside_the_main_thread_only_a_request_stops():
    outcome = []

    def work():
        with StopSignal() as stop:
            stop.check()
            stop.request("SIGUSR1")
            try:
                stop.check()
            except StopRequested as error:
                outcome.append(error.signal_name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == ["SIGUSR1"]


STUBBORN = """
import subprocess, sys, time
from rloo_cli.errors import InterruptedTwiceError
from rloo_cli.run.signals import StopSignal
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"])
with StopSignal(grace_seconds=0.5):
    print(child.pid, flush=True)
    while True:
        try:
            time.sleep(600)
        except InterruptedTwiceError:
            print("unwinding", flush=True)
"""


def test_code_that_swallows_the_second_interrupt_is_ended_with_its_children():
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "unwinding\n"
    assert process.wait(timeout=10) == 130
    deadline = time.monotonic() + 5
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(child)


def test_a_terminal_shows_at_once_that_the_key_was_heard():
    ours, theirs = os.openpty()
    program = "import os, signal\nfrom rloo_cli.run.signals import StopSignal\nwith StopSignal(): os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], stderr=theirs, timeout=60)
    os.close(theirs)
    assert done.returncode == 0
    assert b"SIGINT: stopping" in os.read(ours, 4096)
    os.close(ours)


DEEP_IN_C = """
import hashlib
from rloo_cli.run.signals import StopSignal
with StopSignal(grace_seconds=0.5):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)  # minutes, and no handler of Python's runs meanwhile
"""


def test_a_second_interrupt_ends_a_program_that_is_deep_in_c_code():
    process = subprocess.Popen([sys.executable, "-c", DEEP_IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "busy\n"
    for _ in range(2):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "--resume" in error


def runs(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
