"""Group B, of two processes: a signal to the launcher or to one of them, and one that is killed."""

from __future__ import annotations

import json
import os
import signal

from card import fault

SLOW = """\
import time
def slow(completions, **kwargs):
    time.sleep(0.4)
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""
SETTINGS = ("num_processes=2", "rewards=[{function: slow.slow}]", "save_steps=2")
"""Steps of most of a second, so that the third is not over before it was seen."""


@fault("B2", "SIGUSR1 to the launcher of two ranks; to one rank alone")
def signals_over_ranks(bench):
    bench.write("slow.py", SLOW)
    bench.gold(*SETTINGS)
    launcher = bench.train(settings=SETTINGS, signal_when=(signal.SIGUSR1, lambda folder: steps_done(folder) >= 3))
    rank = bench.train(settings=SETTINGS, inject=lambda: to_a_rank(1, signal.SIGUSR1))
    for where, outcome in (("launcher", launcher), ("rank 1", rank)):
        says = ["stopped by SIGUSR1", "is saved", f"--output-dir {outcome.folder} --resume"]
        bench.check(outcome, code=75, says=says, where=f"{where}: ")
        reports = reports_of(outcome.folder)
        bench.expect("exit code", [report["exit_code"] for report in reports] == [75, 75], f"{where}: {reports}")
        bench.expect("message", len({report["reason"] for report in reports}) == 1, f"{where}: the ranks stopped apart: {reports}")
        bench.expect("nothing lost", max(outcome.steps, default=0) >= 3, f"{where}: checkpoints {outcome.steps}")
        bench.resume_is_gold(outcome, where=f"{where}: ")


@fault("B6", "one of two ranks SIGKILLed")
def a_rank_is_killed(bench):
    bench.write("slow.py", SLOW)
    bench.gold(*SETTINGS)
    outcome = bench.train(settings=SETTINGS, inject=lambda: to_a_rank(1, signal.SIGKILL))
    bench.check(outcome, code=1, says=["rank 1 on ", "was ended by SIGKILL", "train-rank-1.log", "--resume goes on"])
    bench.expect("nothing lost", 2 in outcome.steps, f"checkpoints {outcome.steps}")
    bench.resume_is_gold(outcome)


def steps_done(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def reports_of(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("logs/attempt-1/rank-*.json"))]


def to_a_rank(rank, number):
    """In the launcher: the signal goes to one of its processes after the third step."""
    from rloo_cli.launch.local_ranks import LocalRanks

    collect, is_sent = LocalRanks.collect, False

    def collect_and_send(self):
        nonlocal is_sent
        if not is_sent and steps_done(self._attempt.parent.parent) >= 3:
            is_sent = True
            os.kill(self._running[rank].pid, number)
        return collect(self)

    LocalRanks.collect = collect_and_send
