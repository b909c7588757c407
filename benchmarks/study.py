"""Estimators at an equal budget: what each makes of the quickstart in as many steps and completions, over seeds.

    OMP_NUM_THREADS=1 python benchmarks/study.py                  # 7 estimators × 10 seeds, about 30 s each on a core; goes on where it was stopped
    python benchmarks/study.py --table                            # the table of what is done

Every run trains recipes/quickstart.yaml on 128 completions a step, from the same model, at the same learning rate, by the code of `rloo train`; only
the function that turns a batch's rewards into advantages differs. Held-out accuracy is that of completions sampled at temperature 1, which is the
objective (greedy decoding is above 0.99 after 20 steps and tells nobody apart): four of each of the 512 problems of the test split. A row gives the
mean over seeds and its 95 % interval (Student's t), and the difference to RLOO at G = 8 over the same seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from estimators import Advantages, best_of_group, no_baseline, no_baseline_lower, rloo, standardised

FOLDER = Path("build/study")
COMPLETIONS = 128  # of an optimizer step
EVALUATIONS = 3  # a run, evenly spread
BASE = "RLOO, G = 8"
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by number of values

ESTIMATORS: dict[str, tuple[int, Advantages]] = {
    "RLOO, G = 2": (2, rloo),
    "RLOO, G = 4": (4, rloo),
    BASE: (8, rloo),
    "REINFORCE without baseline, G = 8": (8, no_baseline),
    "the same, each reward 1 less": (8, no_baseline_lower),
    "RAFT, best of 8": (8, best_of_group),
    "GRPO-style std, G = 8": (8, standardised),
}
"""Name → (completions of a prompt, advantages from rewards and which rows are scored, both [P, G])."""


def main() -> None:
    """Run what is missing and print the table, or be one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to n-1")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run, a multiple of 3")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results are kept")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, seed = json.loads(arguments.one)
        train_one(name, seed, arguments.steps, arguments.folder)
        return
    if not arguments.table:
        for seed in range(arguments.seeds):  # seed by seed, so that a study that is stopped early is balanced
            for name in ESTIMATORS:
                if not (run_folder(arguments.folder, name, seed, arguments.steps) / "final").exists():
                    command = [sys.executable, __file__, "--steps", str(arguments.steps), "--folder", str(arguments.folder)]
                    subprocess.run([*command, "--one", json.dumps([name, seed])], check=True, stdout=subprocess.DEVNULL)
    print(table(arguments.folder, arguments.seeds, arguments.steps))


def run_folder(folder: Path, name: str, seed: int, steps: int) -> Path:
    """Where one run lies."""
    label = "".join(letter if letter.isalnum() else "-" for letter in name)
    return folder / f"{label}-seed{seed}-steps{steps}"


def train_one(name: str, seed: int, steps: int, folder: Path) -> None:
    """Train in this process with the estimator in RLOO's place."""
    from rloo_cli.cli.app import exit_code_of
    from rloo_cli.training import update

    generations, update.leave_one_out_advantages = ESTIMATORS[name]
    settings = {
        "seed": seed,
        "num_generations": generations,
        "prompts_per_step": COMPLETIONS // generations,
        "max_steps": steps,
        "eval_steps": steps // EVALUATIONS,
        "eval_temperature": 1.0,
        "num_generations_eval": 4,
        "threads": 1,
        "save_strategy": "no",
    }
    command = ["train", "recipes/quickstart.yaml", "--output-dir", str(run_folder(folder, name, seed, steps)), "--resume=auto"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    if code := exit_code_of(command):
        raise SystemExit(code)


def table(folder: Path, seeds: int, steps: int) -> str:
    """The study as Markdown."""
    done = {name: results(folder, name, seeds, steps) for name in ESTIMATORS}
    at = [steps * part // EVALUATIONS for part in range(1, EVALUATIONS + 1)]
    head = ["estimator", "seeds", *(f"step {step}" for step in at), f"against {BASE}", "sampled reward", "entropy"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, runs in done.items():
        if len(runs) < 2:
            continue
        held_out = [interval([run.accuracy[step] for run in runs.values()]) for step in at]
        gains = [run.accuracy[steps] - done[BASE][seed].accuracy[steps] for seed, run in runs.items() if seed in done[BASE]]
        against = "" if name == BASE or len(gains) < 2 else interval(gains, signed=True)
        others = [interval([run.reward for run in runs.values()]), interval([run.entropy for run in runs.values()])]
        lines.append("| " + " | ".join([name, str(len(runs)), *held_out, against, *others]) + " |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run: share of right answers on the held-out problems by step, sampled reward as a mean over all steps, entropy (nats a token) in the last step."""

    accuracy: dict[int, float]
    reward: float
    entropy: float


def results(folder: Path, name: str, seeds: int, steps: int) -> dict[int, Result]:
    """Seed → the run, of those that are finished."""
    runs = {seed: run_folder(folder, name, seed, steps) for seed in range(seeds)}
    return {seed: read_run(run) for seed, run in runs.items() if (run / "final").exists()}


def read_run(run: Path) -> Result:
    """The figures of a finished run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Result(
        accuracy={int(row["step"]): row["eval/reward"] for row in rows if "eval/reward" in row},
        reward=statistics.fmean(row["reward"] for row in rows if "reward" in row),
        entropy=[row["entropy"] for row in rows if "entropy" in row][-1],
    )


def interval(values: Sequence[float], *, signed: bool = False) -> str:
    """Mean ± half the width of its 95 % interval."""
    half = T_975.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{'+' if signed else ''}.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
