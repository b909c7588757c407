"""Groups, entries and a started runner for the tests of reward functions."""

from __future__ import annotations

import textwrap
import time
from contextlib import contextmanager

import psutil

from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.runner import RewardRunner
from rloo_cli.types import Completion, FinishReason, Group, Prompt, TrainerState

STATE = TrainerState(step=3, max_steps=10)


def child_processes(*, recursive=False):
    """This process' children, without those that stay for its lifetime: the judge of math answers, and the tracker of spawned processes."""
    lasting = ("rloo_cli.rewards.math_process", "multiprocessing.resource_tracker")
    return [child for child in psutil.Process().children(recursive) if not any(name in " ".join(child.cmdline()) for name in lasting)]


def group(row, texts, *, content="What?", ids=None, **columns):
    ids = ids or [(row, g) for g in range(len(texts))]
    completions = tuple(
        Completion(token_ids=tuple(i), logprobs=(0.0,) * len(i), finish_reason=FinishReason.STOPPED, weights_version=0) for i in ids
    )
    prompt = Prompt(row=row, content=content, text=str(content), token_ids=(1,), columns=columns)
    return Group(prompt=prompt, completions=completions, texts=tuple(texts))


@contextmanager
def runner(tmp_path, source, *functions, workers=1, log_dir=None, load_timeout=50.0, memory_limit=None, **fields):
    """A started runner over functions of the module `mine`, whose text is `source`; `functions`: names, or RewardEntry."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(source), encoding="utf-8")
    entries = [f if isinstance(f, RewardEntry) else RewardEntry(function=f"mine.{f}", **fields) for f in functions or ["score"]]
    options = {"num_workers": workers, "log_dir": log_dir, "load_timeout": load_timeout, "memory_limit": memory_limit}
    with RewardRunner(entries, code_dir=tmp_path, **options) as started:
        started.start()
        yield started


def rewards(started, *groups, state=STATE, check_stop=None):
    """What `collect` returns for these groups, in order."""
    for key, submitted in enumerate(groups):
        started.submit(key, submitted, state)
    collected = started.collect(check_stop)
    assert list(collected) == list(range(len(groups)))
    return list(collected.values())


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)
