"""Group D, and E3: reward functions that raise, hang, die or return nonsense, and paths that lead to none.

The scorecard's reward is replaced by one that does something bad at one completion of step 5: the checkpoint of step 4 stands, and with
the right function the resumed run has to come to the golden bits.
"""

from __future__ import annotations

import json
from pathlib import Path

from card import fault

STEP = 5
BAD = 1
"""The completion of its group that something bad happens at."""
KL_WEIGHT = 0.05
REWARD = "letters.share_of_letters"
FAULTY = """\
import asyncio, atexit, ctypes, decimal, mmap, os, random, re, resource, signal, subprocess, sys, threading, time

BAD = None

def share_of_letters(completions, trainer_state, completion_ids, prompts, **kwargs):
    global BAD
    values = [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
    if trainer_state.step == {step} and prompts[0] == {prompt!r}:
        if len(completions) > 1:
            BAD = completion_ids[{bad}]
            with open({memo!r}, "w") as memo: memo.write(repr(BAD))
        elif BAD is None and os.path.exists({memo!r}):
            BAD = eval(open({memo!r}).read())
        for i, ids in enumerate(completion_ids):
            if list(ids) == list(BAD):
                {body}
    return values
"""


# --- helpers


def write_faulty(bench, body):
    """Put a reward beside the recipe that runs `body` (`values`, `i` and `completions` are at hand) at one completion of step 5."""
    memo = bench.root / "memo"
    memo.unlink(missing_ok=True)
    prompt = prompt_of_step(bench)
    bench.write("letters.py", FAULTY.format(step=STEP, bad=BAD, body=body, memo=str(memo), prompt=prompt))


def prompt_of_step(bench):
    """The prompt of the first group of step 5 in the golden run."""
    import pyarrow.parquet as pq

    path = bench.root / "prompt-of-step"
    if not path.exists():
        done = bench.train()
        assert done.code == 0, done.tail()
        path.write_text(pq.read_table(done.folder / "rollouts" / f"{STEP:06d}.parquet").column("prompt").to_pylist()[0])
    return json.loads(path.read_text())


def entry(**fields):
    """The setting that describes the reward with these fields."""
    return "rewards=" + json.dumps([{"function": REWARD, **fields}])


def stops(bench, name, body, says, *, timeout=30.0, within=60.0, settings=(), resumes=True, logged=()):
    """A run that has to stop with exit code 4, and goes on to the golden bits once the function is right."""
    right = (bench.root / "letters.py").read_text()
    write_faulty(bench, body)
    outcome = bench.train(settings=[entry(timeout=timeout), *settings])
    where = f"{name}: "
    place = [f"`share_of_letters`: step {STEP}, prompt row ", f"completion {BAD}"] if resumes is not None else []
    bench.check(outcome, code=4, says=[*place, *says, "on_error: unscored"], within=within, where=where)
    missing = [text for text in logged if text not in outcome.log]
    bench.expect("message", not missing, f"{where}the log has no {missing}")
    bench.expect("nothing lost", outcome.steps == [2, 4], f"{where}checkpoints {outcome.steps} instead of [2, 4]")
    bench.write("letters.py", right)
    if resumes:
        bench.resume_is_gold(outcome, where=where)
    return outcome


def leaves_out(bench, name, body, *, timeout=30.0, settings=()):
    """A run that leaves one completion out, counts and warns, and comes to its end."""
    right = (bench.root / "letters.py").read_text()
    write_faulty(bench, body)
    outcome = bench.train(settings=[entry(timeout=timeout, on_error="unscored"), *settings])
    where = f"{name}, unscored: "
    bench.check(outcome, code=0, says=["warning: reward `share_of_letters`", "left out (1 completion"], lines=2, where=where)
    failures = [row.get("rewards/failures", 0) for row in outcome.rows if "loss" in row]
    bench.expect("nothing lost", sum(failures) == 1 and len(failures) == 6, f"{where}{failures} failures are counted instead of 1")
    left_out_of_the_baseline(bench, outcome, where)
    bench.write("letters.py", right)
    return outcome


def left_out_of_the_baseline(bench, outcome, where):
    """Expect one row of step 5 without reward or advantage, and its siblings' baselines made of each other."""
    import pyarrow.parquet as pq

    path = outcome.folder / "rollouts" / f"{STEP:06d}.parquet"
    rows = pq.read_table(path).to_pylist() if path.exists() else []
    if not bench.expect(
        "nothing lost", [i for i, row in enumerate(rows) if row["reward"] is None] == [BAD], f"{where}other rows are unscored"
    ):
        return
    scored = [row["reward"] - KL_WEIGHT * row["kl"] for row in rows[:4] if row["reward"] is not None]
    wanted = [value - (sum(scored) - value) / (len(scored) - 1) for value in scored]
    found = [row["advantage"] for row in rows[:4] if row["reward"] is not None]
    close = all(abs(a - b) < 1e-9 for a, b in zip(wanted, found, strict=True))
    bench.expect("nothing lost", close, f"{where}advantages {found} instead of {wanted}")
    bench.expect("nothing lost", not rows[BAD]["advantage"], f"{where}the row has the advantage {rows[BAD]['advantage']}")


# --- D


@fault("D1", "a reward raises on one item", quick=True)
def a_reward_raises(bench):
    trace = ["Traceback (most recent call last)", "letters.py", "ValueError: boom\nsecond line\n"]
    stops(bench, "raise", "raise ValueError('boom\\nsecond line')", ["ValueError: boom (letters.py:"], logged=trace)
    leaves_out(bench, "raise", "raise ValueError('boom')")
    exits = "raise type('E', (BaseException,), {'__str__': lambda s: sys.exit(1)})()"
    stops(bench, "a hostile exception", exits, ["E: (its message cannot be shown)"], resumes=False)
    stops(bench, "100 MB of message", "raise ValueError('x' * 10**8)", ["ValueError: xxxx"], resumes=False)
    stops(bench, "recursion", "(lambda f: f(f))(lambda f: f(f))", ["RecursionError"], resumes=False)


HANGS = {
    "sleep": "time.sleep(1000)",
    "endless loop": "while True: pass",
    "catastrophic regex": "re.match('(a+)+$', 'a' * 64 + 'b')",
    "C code that holds the interpreter's lock": "ctypes.PyDLL(None).pause()",
    "signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(1000)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a value that hangs when it is read": "values[i] = type('F', (float,), {'__float__': lambda s: time.sleep(1000)})(1)",
    "a list without an end": "return type('L', (list,), {'__iter__': lambda s: iter(int, 1)})([0] * len(values))",
}


@fault("D2", "a reward hangs: loop, regex, sleep, in C, with signals blocked, stopped")
def a_reward_hangs(bench):
    for name, body in HANGS.items():
        stops(bench, name, body, ["no answer within 0.5 s, its worker was killed"], timeout=0.5, within=20.0, resumes=name == "sleep")
    leaves_out(bench, "sleep", HANGS["sleep"], timeout=0.5)


VALUES = {
    "float('nan')": "returned nan, not a finite float or None",
    "float('inf')": "returned inf, not a finite float or None",
    "'1'": "returned '1' (str), not a float or None",
    "True": "returned True (bool), not a float or None",
    "10**400": "returned a number beyond the range of a float (int)",
    "1j": "returned 1j (complex)",
    "decimal.Decimal('0.5')": "returned Decimal('0.5') (Decimal)",
    "[0.5]": "returned [0.5] (list)",
    "object()": "returned <object object",
}
FORMS = {
    "(v for v in values)": "returned <generator object",
    "None": "returned None, not a list with one float or None for each of the 4 completions",
    "values[:-1]": "returned 3 rewards for 4 completions",
    "dict(enumerate(values))": "not a list with one float or None",
    "'abcd'": "returned 'abcd', not a list",
}


@fault("D3", "values that are no rewards: NaN, inf, text, bool, None, wrong length, generator, 10**400")
def values_that_are_no_rewards(bench):
    for value, says in VALUES.items():
        stops(bench, value, f"values[i] = {value}", [says], resumes=value == "float('nan')")
    for value, says in FORMS.items():
        stops(bench, value, f"return {value}", [says], resumes=None)
    leaves_out(bench, "nan", "values[i] = float('nan')")
    right = (bench.root / "letters.py").read_text()
    write_faulty(bench, "values[i] = None")
    outcome = bench.train()
    bench.check(outcome, code=0, where="None: ")
    bench.expect("message", not outcome.error.strip(), f"None: a word about what is allowed: {outcome.tail()}")
    counted = [(row.get("rewards/failures"), row.get("rows/unscored")) for row in outcome.rows if row["step"] == STEP]
    bench.expect("nothing lost", counted == [(0.0, 1.0)], f"None: (failures, unscored) {counted} instead of (0, 1)")
    left_out_of_the_baseline(bench, outcome, "None: ")
    bench.write("letters.py", right)


ENDS = {
    "os._exit": ("os._exit(7)", "its worker died: exit code 7"),
    "sys.exit": ("sys.exit(3)", "SystemExit: 3"),
    "segfault": ("ctypes.string_at(0)", "its worker died: signal 11 (SIGSEGV)"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "its worker died: signal 9 (SIGKILL)"),
    "closes its connection": ("os.closerange(3, 1000)", "its worker died"),
    "garbage on its connection": (
        "[os.write(fd, b'x' * 999) for fd in range(3, 40) if os.path.exists(f'/proc/self/fd/{fd}') and 'socket' in os.readlink(f'/proc/self/fd/{fd}')]",
        "its worker died: it sent",
    ),
    "memory bomb": ("x = [bytearray(2**24) for _ in range(10**6)]", "MemoryError"),
    "shared memory bomb": (
        "m = mmap.mmap(-1, 2**30); [m.write(b'x' * 2**20) for _ in range(1024)]; time.sleep(9)",
        "GiB of memory, and may hold 0.5",
    ),
    "kills the process that forks workers": (
        "os.kill(os.getppid(), 9); time.sleep(9)",
        "the process that forks reward workers ended: signal 9",
    ),
}
LIVE_ON = {
    "child": "subprocess.Popen(['sleep', '1000'])",
    "child in a session of its own": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "daemon": "subprocess.Popen(['sh', '-c', 'setsid setsid sleep 1000 & exit']).wait()",
    "deaf daemon": "subprocess.Popen(['setsid', 'sh', '-c', \"trap '' 1 2 15; sleep 1000 & sleep 1000\"])",
    "thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "hanging exit handler": "atexit.register(time.sleep, 1000)",
}


@fault("D4", "a reward ends its process, leaves children behind, eats memory")
def a_reward_ends_its_process(bench):
    for name, (body, says) in ENDS.items():
        lines = 2 if name.startswith("kills") else 1
        outcome = stops_with(bench, name, body, says, lines=lines)
        if name == "os._exit":
            bench.resume_is_gold(outcome)
    for name, body in LIVE_ON.items():
        right = (bench.root / "letters.py").read_text()
        write_faulty(bench, body)
        outcome = bench.train()
        bench.check(outcome, code=0, where=f"{name}: ")
        bench.is_gold(outcome.folder, where=f"{name}: ")
        bench.write("letters.py", right)
    leaves_out(bench, "os._exit", "os._exit(7)")
    daemon = "subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)"
    leaves_out(bench, "a late one with a daemon", daemon, timeout=0.5)


def stops_with(bench, name, body, says, *, lines):
    """As `stops`, under a limit of memory."""
    right = (bench.root / "letters.py").read_text()
    write_faulty(bench, body)
    outcome = bench.train(settings=["reward_memory_gb=0.5"])
    place = [f"`share_of_letters`: step {STEP}, prompt row ", f"completion {BAD}", says]
    bench.check(outcome, code=4, says=place, lines=lines, where=f"{name}: ")
    bench.expect("nothing lost", outcome.steps == [2, 4], f"{name}: checkpoints {outcome.steps} instead of [2, 4]")
    bench.write("letters.py", right)
    return outcome


SIDE_EFFECTS = {
    "100 MB of output": "[print('x' * 2**20) for _ in range(100)]; os.write(2, b'y' * 2**20)",
    "another folder": "os.chdir('/'); os.environ.clear(); os.umask(0o777)",
    "seeds": "random.seed(0); __import__('numpy').random.seed(0)",
    "streams closed": "sys.stdout.close(); sys.stderr.close(); os.close(0); os.close(1); os.close(2)",
    "signals, timers, limits": "signal.signal(15, signal.SIG_DFL); signal.alarm(1); sys.setrecursionlimit(50)",
    "arguments changed": "completions.clear(); prompts.clear(); kwargs.clear(); completion_ids.clear()",
    "a busy thread": "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
}


@fault("D5", "a reward prints 100 MB, changes folder, environment, seeds, closes stdout")
def a_reward_with_side_effects(bench):
    for name, body in SIDE_EFFECTS.items():
        right = (bench.root / "letters.py").read_text()
        write_faulty(bench, f"{body}; break")
        outcome = bench.train()
        bench.check(outcome, code=0, where=f"{name}: ")
        bench.is_gold(outcome.folder, where=f"{name}: ")
        bench.expect("message", len(outcome.output) < 20_000, f"{name}: {len(outcome.output)} characters reach the terminal")
        logs = sum(path.stat().st_size for path in outcome.folder.rglob("logs/**/*") if path.is_file())
        bench.expect("nothing left behind", logs < 8 * 2**20, f"{name}: logs of {logs} bytes")
        bench.write("letters.py", right)


BUILT_INS = {
    "accuracy.accuracy_reward": {},
    "reasoning_accuracy.reasoning_accuracy_reward": {},
    "think_format.think_format_reward": {},
    "soft_overlong.soft_overlong_punishment_reward": {},
    "repetition_penalty.repetition_penalty_reward": {},
    "cosine_length.cosine_length_reward": {"max_len": 100},
    "exact_match.exact_match_reward": {"column": "answer"},
    "regex.regex_reward": {"pattern": "<answer>.*</answer>"},
    "python_tests.python_tests_reward": {"seconds": 1.0},
}


@fault("D6", "hostile completions through every built-in reward")
def hostile_completions(bench):
    import sys

    import pyarrow.parquet as pq

    sys.path.append(str(Path(__file__).resolve().parent.parent / "rewards"))
    from test_hostile_completions import HOSTILE

    texts = list(HOSTILE.values())
    data = [{"prompt": f"Prompt {i}", "answer": "4", "tests": ["assert f(1) == 2"]} for i in range(6)]
    bench.write("prompts.jsonl", "".join(json.dumps(row) + "\n" for row in data))
    imports_ = [f"from rloo_cli.rewards.{path.replace('.', ' import ')}\n" for path in BUILT_INS]
    bench.write("built_in.py", f"{''.join(imports_)}from rloo_cli.rewards import math_judge\nmath_judge.CPU_SECONDS = 0.3  # not 3\n")
    rewards = [{"function": f"built_in.{path.partition('.')[2]}", "kwargs": kwargs} for path, kwargs in BUILT_INS.items()]
    before = {path.name for path in bench.root.iterdir()}
    outcome = bench.train(settings=[f"rewards={json.dumps(rewards)}", "max_steps=3", "reward_workers=2"], inject=lambda: speak(texts))
    bench.check(outcome, code=0, within=60.0)
    new = {path.name for path in bench.root.iterdir() if not path.name.startswith((".output", ".error"))} - before
    bench.expect("nothing lost", new == {outcome.folder.name}, f"something else appeared beside the recipe: {sorted(new)}")
    tables = [pq.read_table(path).to_pydict() for path in sorted(outcome.folder.glob("rollouts/*.parquet"))]
    seen = sum(len(table["reward"]) for table in tables)
    columns = [name for name in (tables[0] if tables else []) if name.startswith("rewards/")]
    bench.expect("nothing lost", seen >= len(texts), f"{seen} completions instead of {len(texts)} at least")
    bench.expect("nothing lost", len(columns) == 9, f"the rollouts know {len(columns)} rewards instead of 9")
    right = [
        value for table in tables for name in ("rewards/accuracy_reward", "rewards/python_tests_reward") for value in table.get(name, [])
    ]
    bench.expect("nothing lost", set(right) == {0.0}, f"hostile answers count as right: {sorted(set(right))}")


def speak(texts):
    """Let the model say these texts, one after the other, whatever it samples."""
    from dataclasses import replace
    from itertools import cycle

    from rloo_cli.training.collector import Collector

    lines, original = cycle(texts), Collector._group

    def group(self, *arguments):
        made = original(self, *arguments)
        return replace(made, texts=tuple(next(lines) for _ in made.texts))

    Collector._group = group


# --- E3

PATHS = {
    "nowhere.score": "no module `nowhere` among the installed packages",
    "letters.share_of_leters": "Did you mean `share_of_letters`?",
    "letters.deeper.score": "`letters` is a module, not a package",
    "letters.LIMIT": "is a constant, not a function",
    "letters.Scorer": "is a class; name a function",
    "letters.positional": "is positional-only",
    "letters.no_reward": "takes no `completions`",
    "letters": "no built-in reward `letters`",
    "accuracy_rewrad": "Did you mean `accuracy_reward`?",
    "broken.score": "broken.py:1: ",
    "outside.score": "no module `outside`",
    "subprocess.getoutput": "belongs to Python itself",
    "os.system": "belongs to Python itself",
    "./letters.py": "no dotted import path",
    "../elsewhere.score": "no dotted import path",
}
OTHERS = """
open({canary!r}, "w").close()
LIMIT = 3
class Scorer:
    def __call__(self, completions): return [1.0] * len(completions)
def positional(completions, /): return [1.0] * len(completions)
def no_reward(cmd): return open({canary!r}, "w")
"""
IMPORTS = {
    "raises": ("raise ValueError('not today')", "ValueError: not today (imported.py:1)"),
    "leaves": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "ends its process": ("import os; os._exit(3)", "ended its process: exit code 3"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "ended its process: signal 11 (SIGSEGV)"),
    "hangs": ("import time; time.sleep(1000)", "took longer than 4 s"),
    "hangs with a daemon": (
        "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)",
        "took longer than 4 s",
    ),
    "eats memory": ("x = [bytearray(2**24) for _ in range(10**6)]", "MemoryError"),
    "floods": ("import os, sys\nfor _ in range(100): os.write(1, b'x' * 2**20)\nraise ValueError('done')", "ValueError: done"),
    "defines no such thing": ("if False: score = 3", "imported.score"),
}


@fault("E3", "reward paths: missing, not callable, outside the code folders; imports that raise or hang", quick=True)
def reward_paths(bench):
    canary = bench.root / "canary"
    bench.write("letters.py", (bench.root / "letters.py").read_text() + OTHERS.format(canary=str(canary)))
    bench.write("broken.py", f"def score(: pass\nopen({str(canary)!r}, 'w')")
    for name in ("outside.py", "elsewhere.py"):
        bench.write(f"other/{name}", f"open({str(canary)!r}, 'w')\ndef score(completions): return [1.0] * len(completions)")
    for path, says in PATHS.items():
        kwargs = {"cmd": f"touch {canary}"} if path == "subprocess.getoutput" else {}
        outcome = bench.train(settings=["rewards=" + json.dumps([{"function": path, "kwargs": kwargs}])])
        bench.check(outcome, code=2, says=[says], within=20.0, where=f"{path}: ")
        bench.expect("nothing left behind", not outcome.folder.exists(), f"{path}: a run folder")
    outcome = bench.train("--code-dir", str(bench.root / "other"))
    bench.check(outcome, code=2, says=["no module `letters`", "`--code-dir "], within=20.0, where="in the working directory alone: ")
    bench.expect("nothing lost", not canary.exists(), "a module was imported that should have been read")
    imports(bench)


def imports(bench):
    """Imports that do not come to an end, or to a bad one."""
    for name, (body, says) in IMPORTS.items():
        bench.write(
            "imported.py", f"{body}\ndef score(completions): return [1.0] * len(completions)\n" if "defines" not in name else f"{body}\n"
        )
        settings = ["rewards=[{function: imported.score}]", "reward_memory_gb=0.5"]
        outcome = bench.train(settings=settings, inject=wait_four_seconds)
        bench.check(outcome, code=2, says=[says], within=20.0, where=f"{name}: ")
        bench.expect("nothing lost", not list(outcome.folder.glob("checkpoints/*")), f"{name}: something was trained")


def wait_four_seconds():
    """Give imports four seconds instead of fifty."""
    from rloo_cli.rewards.runner import RewardRunner

    RewardRunner.__init__.__kwdefaults__["load_timeout"] = 4.0
