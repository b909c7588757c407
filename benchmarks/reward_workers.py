"""What reward workers cost a step: the quickstart with its reward in a worker, and in the trainer, in turn, each run in its own process.

    python benchmarks/reward_workers.py                      # 4 rounds of 2 × 40 steps; a few minutes on two CPU cores
    python benchmarks/reward_workers.py --rounds 8 --steps 20

`reward` is how long a step waits for rewards after its last completion (perf/seconds/reward): rewards of finished groups are computed while the
others are generated. Medians over the steps of all rounds, two steps of warm-up left out. The quickstart's
reward itself takes microseconds, so the difference is what the workers cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
SIDES = ("worker", "trainer")
PHASE = "perf/seconds/"


def main() -> None:
    """Run both sides in turn and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    arguments = parser.parse_args()
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            steps[side] += run(side, arguments.steps)
    for side, rows in steps.items():
        medians = {name: 1000 * statistics.median(row[name] for row in rows) for name in ("reward", "step")}
        print(f"{side:8} {len(rows):4} steps   reward {medians['reward']:7.2f} ms   step {medians['step']:8.1f} ms")


def run(side: str, steps: int) -> list[dict[str, float]]:
    """Seconds of `reward` and `step` of each step after the warm-up."""
    rewards = json.dumps([{"function": "quickstart.reward.correct_answer", "run_in": side}])
    settings = [f"max_steps={steps}", "eval_strategy=no", "eval_on_start=false", f"rewards={rewards}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rloo_cli", "train", "recipes/quickstart.yaml", "-o", f"{folder}/run", "--quiet"]
        sets = [part for setting in settings for part in ("--set", setting)]
        subprocess.run([*command, *sets], cwd=ROOT, env=os.environ, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [{name.removeprefix(PHASE): value for name, value in json.loads(line).items() if name.startswith(PHASE)} for line in lines]
    return [{name: row[name] for name in ("reward", "step")} for row in rows[WARM_UP:]]


if __name__ == "__main__":
    main()
