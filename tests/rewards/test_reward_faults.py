"""What hostile or broken reward functions do, and what becomes of it (scorecard, group D)."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path

import psutil
import pytest
from running import STATE, alive, child_processes, group, rewards, runner, wait_until

from rloo_cli.errors import RewardError
from rloo_cli.rewards.memory import memory_share

MIB = 2**20


def on_bad(body):
    """A function that does `body` where a completion is "bad", and scores the others 1."""
    return f"""
import asyncio, ctypes, os, random, re, resource, signal, subprocess, sys, threading, time
def score(completions, **kwargs):
    values = [1.0] * len(completions)
    for i, c in enumerate(completions):
        if c == "bad":
            {body}
    return values
"""


# --- values


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ("float('nan')", "returned nan, not a finite float"),
        ("float('-inf')", "returned -inf"),
        ("'1'", "returned '1' (str), not a float or None"),
        ("True", "returned True (bool), not a float or None: write float(…)"),
        ("10**400", "returned a number beyond the range of a float (int)"),
        ("10**6000", "returned a number beyond the range of a float (int)"),
        ("[1.0]", "returned [1.0] (list)"),
        ("1j", "returned 1j (complex)"),
        ("object()", "returned <object object"),
        ("'x' * 10**6", "xxxx…"),
    ],
)
def test_a_value_that_is_no_reward_stops_the_run(tmp_path, value, fragment):
    with runner(tmp_path, on_bad(f"values[i] = {value}")) as started, pytest.raises(RewardError) as caught:
        rewards(started, group(11, ["a", "b", "bad", "c"]))
    message = caught.value.message
    assert message.startswith("reward `score`: step 3, prompt row 11, completion 2: ")
    assert fragment in message
    assert "on_error: unscored" in message
    assert len(message) < 300
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ("(x for x in [1.0, 1.0])", "returned <generator object"),
        ("None", "returned None, not a list with one float or None for each of the 2 completions"),
        ("1.0", "returned 1.0, not a list"),
        ("'12'", "returned '12', not a list"),
        ("{0: 1.0, 1: 1.0}", "not a list"),
        ("[1.0]", "returned 1 rewards for 2 completions: [1.0]"),
        ("[1.0] * 10**6", "returned 1000000 rewards for 2 completions"),
        ("[[1.0, 2.0]]", "returned 1 rewards for 2 completions"),
    ],
)
def test_a_return_value_of_the_wrong_form_stops_the_run(tmp_path, value, fragment):
    """Not hidden by the second attempt: called with one completion, `[1.0]` would be right."""
    with runner(tmp_path, f"def score(completions): return {value}") as started, pytest.raises(RewardError) as caught:
        rewards(started, group(11, ["a", "b"]))
    assert caught.value.message.startswith("reward `score`: step 3, prompt row 11: ")
    assert fragment in caught.value.message


@pytest.mark.parametrize(
    "value",
    [
        "(0.5, None)",
        "__import__('numpy').array([0.5, 2], dtype='float32')",
        "[__import__('numpy').float32(0.5), __import__('numpy').int64(2)]",
        "[__import__('fractions').Fraction(1, 2), 2]",
    ],
)
def test_numbers_of_other_kinds_are_taken(tmp_path, value):
    with runner(tmp_path, f"def score(completions): return {value}") as started:
        values = rewards(started, group(0, ["a", "b"]))[0].values[0]
    assert values in ((0.5, 2.0), (0.5, None))
    assert all(type(value) is float for value in values if value is not None)


# --- raising, hanging, dying

FAULTS = {
    "raise": ("raise ValueError('boom\\nsecond line')", "ValueError: boom (mine.py:"),
    "exception that exits when shown": (
        "raise type('E', (Exception,), {'__str__': lambda s: sys.exit(1)})()",
        "E: (its message cannot be shown)",
    ),
    "exception of 100 MB": ("raise ValueError('x' * 10**7)", "ValueError: xxxx"),
    "exception that hangs when shown": (
        "raise type('E', (Exception,), {'__str__': lambda s: time.sleep(1000)})()",
        "no answer within 0.3 s",
    ),
    "value that hangs when read": (
        "values[i] = type('F', (float,), {'__float__': lambda s: time.sleep(1000)})(1)",
        "no answer within 0.3 s",
    ),
    "value that raises when read": ("values[i] = type('F', (float,), {'__float__': lambda s: 1 / 0})(1)", "ZeroDivisionError"),
    "value that exits when shown": ("values[i] = type('R', (), {'__repr__': lambda s: sys.exit(3)})()", "SystemExit: 3"),
    "list without an end": ("return type('L', (list,), {'__iter__': lambda s: iter(int, 1)})([0] * len(completions))", "no answer within"),
    "kills the process that forks workers": (
        "os.kill(os.getppid(), 9); time.sleep(1)",
        "the process that forks reward workers ended: signal 9",
    ),
    "hostile exception": ("raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})()", "E: (its message cannot be shown)"),
    "sys.exit": ("sys.exit(3)", "SystemExit: 3"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "recursion": ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
    "os._exit": ("os._exit(7)", "its worker died: exit code 7"),
    "segfault": ("ctypes.string_at(0)", "its worker died: signal 11 (SIGSEGV)"),
    "abort": ("os.abort()", "its worker died: signal 6 (SIGABRT)"),
    "kills itself": ("os.kill(os.getpid(), 9)", "its worker died: signal 9 (SIGKILL)"),
    "closes all files": ("os.closerange(0, 1000)", "its worker died"),
    "writes to our socket": (
        "[os.write(fd, b'garbage' * 100) for fd in range(3, 40) if os.path.exists(f'/proc/self/fd/{fd}') and 'socket' in os.readlink(f'/proc/self/fd/{fd}')]",
        "its worker died: it sent",
    ),
    "endless loop": ("while True: pass", "no answer within 0.3 s, its worker was killed"),
    "sleep": ("time.sleep(1000)", "no answer within 0.3 s"),
    "catastrophic regex": ("re.match(r'(a+)+$', 'a' * 64 + 'b')", "no answer within 0.3 s"),
    "hang with signals blocked": ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(1000)", "no answer within 0.3 s"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer within 0.3 s"),
    "hang in C": ("ctypes.CDLL(None).pause()", "no answer within 0.3 s"),
    "hang holding the lock of the interpreter": ("ctypes.PyDLL(None).pause()", "no answer within 0.3 s"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_bad_completion_costs_its_own_reward_and_nothing_else(tmp_path, name):
    body, fragment = FAULTS[name]
    begun = time.monotonic()
    with runner(tmp_path, on_bad(body), workers=2, timeout=0.3, on_error="unscored") as started:
        before, hit, after = rewards(started, group(0, ["a", "b"]), group(1, ["a", "bad", "c"]), group(2, ["d"]), check_stop=lambda: None)
        assert before.values == ((1.0, 1.0),)
        assert hit.values == ((1.0, None, 1.0),)
        assert after.values == ((1.0,),)
        assert len(hit.failures) == 1
        assert hit.failures[0].startswith("score: prompt row 1, completion 1: ")
        assert fragment in hit.failures[0]
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)
    assert time.monotonic() - begun < 8
    assert not child_processes()


@pytest.mark.parametrize("name", ["raise", "os._exit", "sleep"])
def test_stop_names_the_place_and_keeps_the_traceback_for_the_log(tmp_path, name, caplog):
    body, fragment = FAULTS[name]
    caplog.set_level(logging.INFO)
    with runner(tmp_path, on_bad(body), timeout=0.3) as started:
        with pytest.raises(RewardError) as caught:
            rewards(started, group(4, ["a", "bad"]))
        assert f"reward `score`: step 3, prompt row 4, completion 1: {fragment}" in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.exit_code == 4
        started.discard()
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)
    # The log alone: the terminal gets the error itself, once.
    logged = [record for record in caplog.records if record.name == "rloo_cli.rewards.ledger"]
    assert [record.levelno for record in logged] == [logging.INFO] * 2
    assert [("Traceback (most recent call last)" in record.getMessage()) for record in logged] == [name == "raise"] * 2


def test_a_fault_that_passes_costs_nothing(tmp_path):
    source = f"""
import os
from pathlib import Path
LOG = Path({str(tmp_path)!r}, "log")
mine = 0
def score(completions):
    global mine
    mine += 1
    with LOG.open("a") as log: log.write(f"{{os.getpid()}} {{mine}} {{','.join(completions)}}\\n")
    if LOG.read_text().count("\\n") == 2: raise OSError("try again")
    return [float(len(c)) for c in completions]
"""
    with runner(tmp_path, source) as started:
        first, second = rewards(started, group(0, ["a", "bb"]), group(1, ["c", "dd", "eee"]))
    assert (first.values, second.values, second.failures) == (((1.0, 2.0),), ((1.0, 2.0, 3.0),), ())
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [call[2] for call in calls] == ["a,bb", "c,dd,eee", "c", "dd", "eee"]
    assert calls[1][0] != calls[2][0], "another process"
    assert [call[1] for call in calls] == ["1", "2", "1", "2", "3"], "that did nothing before"


def test_only_the_rows_whose_values_are_wrong_are_called_again(tmp_path):
    source = on_bad("values[i] = float('nan')").replace(
        "return values", "print(completions); return [v * len(completions) for v in values]"
    )
    with runner(tmp_path, source, on_error="unscored", log_dir=tmp_path) as started:
        (one,) = rewards(started, group(0, ["a", "bad", "c"]))
    assert one.values == ((3.0, None, 3.0),)


def test_functions_of_a_group_fail_apart(tmp_path):
    source = """
import asyncio, os, time
async def fine(completions):
    await asyncio.sleep(0.1)
    return [1.0] * len(completions)
async def late(completions): await asyncio.sleep(60)
async def rude(completions):
    try: await asyncio.sleep(60)
    except asyncio.CancelledError: time.sleep(60)
async def raises(completions): raise ValueError("boom")
def dies(completions): os._exit(1)
def last(completions): return [2.0] * len(completions)
"""
    with runner(tmp_path, source, "fine", "late", "raises", "dies", "last", timeout=0.3, on_error="unscored") as started:
        (one,) = rewards(started, group(0, ["a", "b"]))
    assert one.values == ((1.0, 1.0), (None, None), (None, None), (None, None), (2.0, 2.0))
    assert [line.split(":")[0] for line in one.failures] == ["late"] * 2 + ["raises"] * 2 + ["dies"] * 2
    with runner(tmp_path, source, "fine", "rude", timeout=0.3, on_error="unscored") as started:
        (one,) = rewards(started, group(0, ["a", "b"]))
    assert one.values == ((1.0, 1.0), (None, None))
    assert "no answer within 0.3 s" in one.failures[0]


ASYNC_FAULTS = {
    "never ends": ("await asyncio.Event().wait()", "no answer within 0.3 s"),
    "blocks the loop": ("time.sleep(1000)", "no answer within 0.8 s, its worker was killed"),
    "exits in a task": ("asyncio.create_task(exits()); await asyncio.sleep(0.1)", "SystemExit: 3"),
    "stops the loop": ("asyncio.get_running_loop().stop(); await asyncio.sleep(0.1)", "RuntimeError: Event loop stopped"),
}


@pytest.mark.parametrize("name", ASYNC_FAULTS)
def test_a_coroutine_function_costs_its_own_reward_and_nothing_else(tmp_path, name):
    body, fragment = ASYNC_FAULTS[name]
    source = "import sys\nasync def exits(): sys.exit(3)\n" + on_bad(body).replace("def score", "async def score")
    with runner(tmp_path, source, timeout=0.3, on_error="unscored") as started:
        hit, after = rewards(started, group(0, ["a", "bad"]), group(1, ["a"]))
        assert (hit.values, after.values) == (((1.0, None),), ((1.0,),))
        assert fragment.replace("0.8", "0.3") in hit.failures[0]


def test_a_server_that_was_stopped_is_replaced(tmp_path, caplog):
    with runner(tmp_path, on_bad("os.kill(os.getppid(), 19); os._exit(1)"), timeout=0.3, on_error="unscored", load_timeout=1.5) as started:
        (one,) = rewards(started, group(0, ["a", "bad"]))
        assert one.values == ((1.0, None),)
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)
    assert "the process that forks reward workers ended: signal 9 (SIGKILL); another one is started" in caplog.text
    assert not child_processes(recursive=True)


def test_a_server_that_cannot_be_kept_is_an_error(tmp_path):
    source = "import os\nif os.path.exists('now'): os._exit(3)\n" + on_bad(
        "open('now', 'w').close(); os.kill(os.getppid(), 9); time.sleep(5)"
    )
    source = source.replace("'now'", repr(str(tmp_path / "now")))
    with runner(tmp_path, source) as started, pytest.raises(RewardError, match=r"forks reward workers ended: exit code 3, 4 times"):
        rewards(started, group(0, ["bad"]))


def test_children_of_workers_end_with_a_killed_server(tmp_path):
    source = on_bad("values[i] = float(subprocess.Popen(['sleep', '1000']).pid)")
    with runner(tmp_path, source) as started:
        pid = int(rewards(started, group(0, ["bad"]))[0].values[0][0])
        assert alive(pid)
        child_processes()[0].kill()
        wait_until(lambda: started.poll() or not alive(pid))
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)


def test_a_failed_batch_is_called_again_row_by_row(tmp_path):
    with runner(tmp_path, on_bad("os._exit(1)"), call="batch", on_error="unscored") as started:
        one, two = rewards(started, group(0, ["a", "bad"]), group(1, ["b", "c"]))
    assert (one.values, two.values) == (((1.0, None),), ((1.0, 1.0),))
    assert (len(one.failures), two.failures) == (1, ())


def test_the_deadline_is_for_an_item(tmp_path):
    source = "import time\ndef score(completions):\n    time.sleep(0.25 * len(completions))\n    return [1.0] * len(completions)"
    with runner(tmp_path, source, timeout=0.5) as started:
        assert rewards(started, group(0, ["a"] * 4))[0].values == ((1.0,) * 4,)


def test_an_answer_in_time_counts_however_late_the_trainer_looks(tmp_path):
    with runner(tmp_path, "def score(completions): return [1.0]", timeout=0.3) as started:
        started.submit(0, group(0, ["a"]), STATE)
        time.sleep(1.0)
        assert started.collect()[0].values == ((1.0,),)


def test_many_faults_at_random_moments(tmp_path):
    source = """
import os, time
def score(completions):
    for c in completions:
        if c == "raise": raise ValueError("boom")
        if c == "die": os._exit(1)
        if c == "hang": time.sleep(60)
    return [float("nan") if c == "nan" else 1.0 for c in completions]
"""
    dice = random.Random(0)
    with runner(tmp_path, source, workers=2, timeout=0.3, on_error="unscored") as started:
        for step in range(10):
            texts = [[dice.choice(["ok"] * 60 + ["raise", "die", "nan", "hang"]) for _ in range(4)] for _ in range(8)]
            collected = rewards(started, *[group(row, chosen) for row, chosen in enumerate(texts)])
            for chosen, one in zip(texts, collected):
                assert one.values == (tuple(1.0 if text == "ok" else None for text in chosen),)
                assert len(one.failures) == sum(text != "ok" for text in chosen)


# --- what functions do beside their answer


def test_a_flood_of_output_is_capped(tmp_path):
    source = "import os\ndef score(completions):\n    for _ in range(100): print('x' * 2**20)\n    os.write(2, b'the last line\\n')\n    return [1.0]"
    with runner(tmp_path, source, log_dir=tmp_path / "logs") as started:
        begun = time.monotonic()
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)
        assert time.monotonic() - begun < 5
    log = tmp_path / "logs" / "reward-worker-0.log"
    assert 0 < log.stat().st_size <= 6 * MIB
    assert log.read_text().endswith("the last line\n")
    assert log.read_text().startswith("[earlier output is dropped")


def test_output_goes_to_the_log_of_the_workers_place(tmp_path, capfd):
    source = "import os\nprint('not seen: at import')\ndef score(completions):\n    print('said', completions)\n    os.system('echo from a child')\n    if completions == ['die']: os._exit(1)\n    return [1.0]"
    with runner(tmp_path, source, log_dir=tmp_path / "logs", on_error="unscored") as started:
        rewards(started, group(0, ["a"]), group(1, ["die"]), group(2, ["b"]))
    text = (tmp_path / "logs" / "reward-worker-0.log").read_text()
    assert "said ['a']\nfrom a child\n" in text
    assert "said ['b']\n" in text
    assert capfd.readouterr() == ("", "")


LOOKS_AROUND = """
import locale, os, signal, sys
THEN = sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL)
def home():
    umask = os.umask(0o22)
    os.umask(umask)
    is_same = os.getcwd() == os.environ["HOME_THEN"] and "PATH" in os.environ and "LEFT" not in os.environ and umask != 0o777
    for number in (1, 2, 10, 15, 17):
        os.kill(os.getpid(), number)
    return is_same and (sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL)) == THEN and signal.getsignal(13) == signal.SIG_IGN
"""


@pytest.mark.parametrize(
    "body",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "os.close(0); os.close(1); os.close(2)",
        "sys.stdout = None",
        "os.chdir('/')",
        "os.chdir('/proc'); sys.stdout = open('/dev/full', 'w')",
        "random.seed(0); __import__('numpy').random.seed(0)",
        "signal.alarm(1); time.sleep(0.01)",
        "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 0.15)",
        "sys.stdin.read()",
        "os.environ['LEFT'] = 'behind'; os.environ.pop('PATH')",
        "sys.setrecursionlimit(30)",
        "os.umask(0o777)",
        "import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8' if locale.setlocale(locale.LC_ALL) == 'C' else 'C')",
        "[signal.signal(n, lambda *a: os._exit(1)) for n in (1, 2, 10, 15, 17)]; signal.signal(13, signal.SIG_DFL)",
        "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    ],
)
def test_side_effects_do_not_reach_the_next_call(tmp_path, body, monkeypatch):
    after = """
    print("still here", flush=True)
    if completions == ["look"]: time.sleep(0.3); return [float(home()) + random.random()]
"""
    source = f"{LOOKS_AROUND}{on_bad(body)}".replace("    return values", f"{after}    return values")
    monkeypatch.setenv("HOME_THEN", str(Path.cwd()))
    seen = []
    for text in ("fine", "bad"):
        with runner(tmp_path, source, on_error="unscored") as started:
            _, look = rewards(started, group(0, [text]), group(1, ["look"]))
            seen.append(look.values)
            assert look.failures == ()
    assert seen[0] == seen[1]
    assert seen[0][0][0] > 1


LIVES_ON = {
    "child": "subprocess.Popen(['sleep', '1000'])",
    "child in a session of its own": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "child in a group of its own": "subprocess.Popen(['sleep', '1000'], process_group=0)",
    "daemon": "subprocess.Popen(['sh', '-c', 'setsid setsid sleep 1000 & exit'])",
    "forked daemon": "[os.setsid() or (os.fork() and os._exit(0)) for _ in range(2)] and time.sleep(1000) if os.fork() == 0 else None",
    "deaf child": "subprocess.Popen([sys.executable, '-c', 'import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(1000)'])",
}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *((name, "os._exit(1)") for name in LIVES_ON),
        *((name, "time.sleep(1000)") for name in ("child", "forked daemon")),
        *((name, "None") for name in ("child", "daemon")),
    ],
)
def test_no_child_outlives_its_worker(tmp_path, name, end):
    source = on_bad(f"{LIVES_ON[name]}; time.sleep(0.25); {end}")
    with runner(tmp_path, source, timeout=0.6, on_error="unscored") as started:
        server = child_processes()[0]
        (one,) = rewards(started, group(0, ["bad"]))
        assert one.values == ((1.0 if end == "None" else None,),)
        if end == "None":
            family = [process.pid for process in server.children(recursive=True)]
            assert len(family) >= 2, "the worker and its child, which may serve later calls"
        else:
            wait_until(lambda: len(server.children(recursive=True)) == 1)
            family = []
    assert not [pid for pid in family if alive(pid)]
    assert not child_processes(recursive=True)


def test_a_child_that_returns_from_the_call_does_not_answer(tmp_path):
    with runner(tmp_path, on_bad("os.fork(); values[i] = float(os.getpid())")) as started:
        for _ in range(5):
            (one,) = rewards(started, group(0, ["bad", "a"]))
            assert one.values[0][1] == 1.0
            assert psutil.Process(int(one.values[0][0])).ppid() == child_processes()[0].pid


def test_pools_of_processes_work_in_a_worker(tmp_path):
    source = """
import multiprocessing
def score(completions):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return [float(n) for n in pool.map(len, completions)]
"""
    with runner(tmp_path, source, timeout=10.0) as started:
        assert rewards(started, group(0, ["a", "bb"]))[0].values == ((1.0, 2.0),)


def test_memory_is_bounded_for_a_slow_eater_too(tmp_path):
    source = on_bad("kept = []\n            while True: kept.append(bytearray(8 * 2**20))")
    with runner(tmp_path, source, timeout=10.0, on_error="unscored", memory_limit=300 * MIB) as started:
        (one,) = rewards(started, group(0, ["a", "bad"]))
        assert one.values == ((1.0, None),)
        assert "MemoryError" in one.failures[0]


@pytest.mark.parametrize(
    "body",
    [
        "m = mmap.mmap(-1, 400 * 2**20); [m.write(b'x' * 2**20) for _ in range(400)]; time.sleep(20)",
        "[os.fork() or (bytearray(b'x' * (100 * 2**20)), time.sleep(20)) for _ in range(4)]; time.sleep(20)",
    ],
    ids=["shared among processes", "spread over children"],
)
def test_memory_is_bounded_where_no_single_process_has_too_much(tmp_path, body):
    with runner(tmp_path, "import mmap\n" + on_bad(body), timeout=30.0, on_error="unscored", memory_limit=300 * MIB) as started:
        (one,) = rewards(started, group(0, ["a", "bad"]))
        assert one.values == ((1.0, None),)
        assert "its worker died: it and its children held 0." in one.failures[0]
        assert "GiB of memory, and may hold 0.3" in one.failures[0]
    assert not child_processes(recursive=True)


def test_memory_that_workers_inherit_and_files_that_they_map_are_not_held_against_them(tmp_path):
    (tmp_path / "index").write_bytes(bytes(250 * MIB))
    source = f"""
import mmap, os, time
TABLE = bytearray(b"x" * (150 * 2**20))
INDEX = mmap.mmap(os.open({str(tmp_path / "index")!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
def score(completions):
    for _ in range(4):
        if os.fork() == 0: time.sleep(1.0); os._exit(0)
    sum(INDEX[i] for i in range(0, len(INDEX), 4096))
    time.sleep(0.8)
    return [1.0] * len(completions)
"""
    with runner(tmp_path, source, memory_limit=400 * MIB) as started:
        assert rewards(started, group(0, ["a"]))[0].values == ((1.0,),)


def test_the_default_share_of_memory_leaves_the_trainer_its_part():
    assert memory_share(10**6) == 2 * 2**30
    assert 2 * 2**30 <= memory_share(3) <= max(2 * 2**30, psutil.virtual_memory().total // 4)
