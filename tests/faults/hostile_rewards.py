"""The quickstart under a reward that fails 2 % of the time: does it finish, is every failure counted, does the reward still climb?

    python -m tests.faults.hostile_rewards                  300 steps, about ten minutes on two CPU cores
    python -m tests.faults.hostile_rewards --steps 40

The reward hangs, raises, ends its process, returns NaN or text, chosen by a checksum of the item: the same in every run and attempt. It writes a
line for each item that it fails, before it does. Those lines, `rewards/failures` of metrics.jsonl and the unscored rows of the rollouts
have to be the same number, step by step, and every other row has to have the reward that it deserves.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
import json, os, time, zlib

KINDS = ("hang", "raise", "exit", "nan", "text", "raise")

def correct_answer(completions, answer, completion_ids, trainer_state, faults, **kwargs):
    values = []
    for messages, gold, ids in zip(completions, answer, completion_ids):
        draw = zlib.crc32(json.dumps([trainer_state.step, gold, ids]).encode())
        kind = KINDS[draw // 50 % len(KINDS)] if draw % 50 == 0 else None
        if kind and len(completions) == 1:
            line = os.open(faults, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(line, f"{trainer_state.step} {kind}\\n".encode())
            os.close(line)
        if kind == "hang": time.sleep(1000)
        if kind == "raise": raise ValueError("two in a hundred")
        if kind == "exit": os._exit(7)
        values.append({"nan": float("nan"), "text": "1.0"}.get(kind, float(messages[0]["content"].endswith("\\\\boxed{%s}" % gold))))
    return values
"""


def main() -> int:
    """Run, compare, tell; 1 where something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile_rewards", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), parser.parse_args().steps)
    print(json.dumps(figures, indent=1))
    return 0 if holds(figures) else 1


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """What a run of so many steps came to."""
    (folder / "flaky.py").write_text(REWARD)
    faults = folder / "faults"
    entry = {"function": "flaky.correct_answer", "on_error": "unscored", "timeout": 0.4, "kwargs": {"faults": str(faults)}}
    settings = [f"max_steps={steps}", "eval_strategy=no", "eval_on_start=false", "logging_steps=50", f"rewards={json.dumps([entry])}"]
    command = [sys.executable, "-m", "rloo_cli", "train", "recipes/quickstart.yaml", "--code-dir", str(folder), "-o", str(folder / "run")]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, *(part for setting in settings for part in ("--set", setting))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    figures: dict[str, Any] = {"exit code": done.returncode, "seconds": round(time.monotonic() - begun), "asked steps": steps}
    figures["words on standard error"] = done.stderr.splitlines()[-3:] if done.returncode else len(done.stderr.splitlines())
    return figures | compare(folder / "run", faults)


def compare(run: Path, faults: Path) -> dict[str, Any]:
    """What the function, metrics.jsonl and the rollouts say of the failures, and whether they agree at every step."""
    lines = [line.split() for line in faults.read_text().splitlines()] if faults.exists() else []
    metrics = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    told = collections.Counter(int(step) for step, _ in lines)
    counted = {row["step"]: int(row["rewards/failures"]) for row in metrics}
    unscored, wrong, rows = unscored_and_wrong(run)
    rewards = [row["reward"] for row in metrics]
    return {
        "steps": len(metrics),
        "completions": rows,
        "failures by the function": len(lines),
        "by kind": dict(collections.Counter(kind for _, kind in lines)),
        "failures in metrics.jsonl": sum(counted.values()),
        "unscored rows in the rollouts": sum(unscored.values()),
        "steps where they differ": [step for step in counted if not told[step] == counted[step] == unscored[step]],
        "rows with another reward than they deserve": wrong,
        "reward of the first ten steps": round(sum(rewards[:10]) / len(rewards[:10]), 3),
        "reward of the last ten steps": round(sum(rewards[-10:]) / len(rewards[-10:]), 3),
    }


def unscored_and_wrong(run: Path) -> tuple[collections.Counter[int], int, int]:
    """Unscored rows of each step, rows whose reward is not the right one, and all rows."""
    import pyarrow.parquet as pq

    answers = {}
    for line in (ROOT / "recipes/quickstart/data/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        answers[row["prompt"][0]["content"]] = row["answer"]
    unscored: collections.Counter[int] = collections.Counter()
    wrong = rows = 0
    for path in sorted((run / "rollouts").glob("*.parquet")):
        for row in pq.read_table(path, columns=["step", "prompt", "completion", "reward"]).to_pylist():
            rows += 1
            question = re.search(r"What is [0-9+]+\?", row["prompt"])
            right = float(row["completion"].endswith(f"\\boxed{{{answers[question[0]]}}}")) if question else None
            unscored[row["step"]] += row["reward"] is None
            wrong += row["reward"] is not None and row["reward"] != right
    return unscored, wrong, rows


def holds(figures: dict[str, Any]) -> bool:
    """Whether it finished, everything agrees, and something was learnt (asked of 40 steps and more)."""
    climbed = figures["reward of the last ten steps"] > figures["reward of the first ten steps"] + 0.1
    return (
        figures["exit code"] == 0
        and figures["steps"] == figures["asked steps"]
        and figures["failures by the function"] > 0
        and not figures["steps where they differ"]
        and not figures["rows with another reward than they deserve"]
        and (climbed or figures["asked steps"] < 40)
    )


if __name__ == "__main__":
    sys.exit(main())
