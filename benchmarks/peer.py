"""This trainer against TRL's RLOOTrainer: same model, prompts, group size and lengths, in turn, each in its own process.

    python benchmarks/peer.py                                # the quickstart model: 16 prompts × 8, 48 tokens, beta 0
    python benchmarks/peer.py --model smollm2                # SmolLM2-135M: 4 prompts × 8, 64 tokens, beta 0.05
    python benchmarks/peer.py --model FOLDER                 # SmolLM2's workload with another model
    python benchmarks/peer.py --sides ours                   # one side alone

Medians over the steps after warm-up; tokens/s over real completion tokens, end-of-sequence included, padding not; peak memory is the
largest resident set of the side's process or of any of its children, as the kernel counts it. Beside the two stands the
floor by count (floor.py). Times alone say nothing on a shared machine; compare the ratio of one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workload import Workload, find_workload, read_rows, reward_name, to_json

HERE = Path(__file__).resolve().parent
WARM_UP = 2
DTYPES = {"bf16": True, "float32": False}


@dataclass(slots=True, kw_only=True)
class Measured:
    """All measured steps of one side at one setting."""

    label: str
    bf16: bool
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: float = 0.0

    @property
    def median_seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Median over steps of completion tokens a second."""
        return statistics.median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    def add(self, steps: dict[str, Any], peak_mb: float) -> None:
        """Take in one process's steps, less the warm-up."""
        self.seconds += steps["seconds"][WARM_UP:]
        self.tokens += steps["tokens"][WARM_UP:]
        self.rewards += steps["rewards"][WARM_UP:]
        for phase, seconds in steps.get("phases", {}).items():
            self.phases.setdefault(phase, []).extend(seconds[WARM_UP:])
        self.peak_mb = max(self.peak_mb, peak_mb)


def run_process(command: list[str], folder: Path, *, threads: int | None = None) -> tuple[str, float]:
    """(standard output, peak resident set in MB) of a process; its last lines and an exit if it failed."""
    out, err = folder / "stdout", folder / "stderr"
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "".join((out.read_text() + err.read_text()).splitlines(keepends=True)[-20:])
        raise SystemExit(f"{' '.join(command)}\nended with exit code {process.returncode}:\n{tail}")
    return out.read_text(), usage.ru_maxrss / 1024


def run_trl(workload: Workload, measured: Measured, *, steps: int, continuous_batching: bool, threads: int | None) -> None:
    """One process of the peer."""
    command = [sys.executable, str(HERE / "trl_side.py"), "--workload", to_json(workload), "--steps", str(steps + WARM_UP)]
    command += ["--bf16"] * measured.bf16 + ["--continuous-batching"] * continuous_batching
    with tempfile.TemporaryDirectory() as folder:
        stdout, peak_mb = run_process(command, Path(folder), threads=threads)
    measured.add(json.loads(stdout.splitlines()[-1]), peak_mb)


def write_recipe(workload: Workload, folder: Path, *, steps: int, bf16: bool) -> Path:
    """The workload as a recipe in `folder`, its reward function beside it. JSON is YAML."""
    shutil.copy(workload.reward, folder / "benchmark_reward.py")
    recipe = {
        "model": {"model_name_or_path": workload.model},
        "data": {"dataset_name": workload.prompts},
        "rewards": [{"function": f"benchmark_reward.{reward_name(workload)}"}],
        "generation": {"num_generations": workload.num_generations, "max_completion_length": workload.max_completion_length},
        "algorithm": {"beta": workload.beta},
        "training": {
            "prompts_per_step": workload.prompts_per_step,
            "max_steps": steps,
            "learning_rate": workload.learning_rate,
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch_fused",
            "bf16": bf16,
            "gradient_checkpointing": False,
        },
        "run": {"output_dir": str(folder / "run"), "save_strategy": "no", "logging_steps": 1},
    }
    path = folder / "benchmark.yaml"
    path.write_text(json.dumps(recipe, indent=2))
    return path


def run_ours(workload: Workload, measured: Measured, *, steps: int) -> None:
    """One process of this trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(workload, folder, steps=steps + WARM_UP, bf16=measured.bf16)
        _, peak_mb = run_process([sys.executable, "-m", "rloo_cli", "train", str(recipe)], folder)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured.add(read_metrics([row for row in rows if "reward" in row], workload), peak_mb)


def read_metrics(rows: list[dict[str, float]], workload: Workload) -> dict[str, Any]:
    """Seconds, tokens, rewards and phases of our training rows."""
    phases = sorted({key for row in rows for key in row if key.startswith("perf/seconds/")})
    by_phase = {phase.removeprefix("perf/seconds/"): [row.get(phase, 0.0) for row in rows] for phase in phases}
    whole = by_phase.pop("step", None) or [sum(parts) for parts in zip(*by_phase.values(), strict=True)]
    tokens = [row["completions/mean_length"] * workload.rows for row in rows]
    return {"seconds": whole, "tokens": tokens, "rewards": [row["reward"] for row in rows], "phases": by_phase}


def run_floor(workload: Workload, tokens: float) -> dict[str, Any]:
    """The floor of a step with `tokens` completion tokens; the decode is taken to last `max_completion_length` token steps."""
    command = [sys.executable, str(HERE / "floor.py"), "--model", workload.model]
    command += ["--prompt-tokens", str(round(mean_prompt_tokens(workload) * workload.prompts_per_step))]
    command += ["--completion-tokens", str(tokens), "--decode-steps", str(workload.max_completion_length)]
    command += ["--reference"] * (workload.beta > 0)
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(run_process(command, Path(folder))[0].splitlines()[-1])


def mean_prompt_tokens(workload: Workload) -> float:
    """Mean length of the first prompts, rendered by the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in read_rows(workload)[:50]]
    return statistics.mean(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def describe(measured: Measured) -> str:
    """A line of the table."""
    phases = ", ".join(f"{name} {statistics.median(seconds):.2f}" for name, seconds in measured.phases.items())
    return (
        f"{measured.label:<16}{measured.median_seconds:>8.2f} s/step {measured.tokens_per_second:>8.0f} tok/s "
        f"{measured.peak_mb:>7.0f} MB   {statistics.mean(measured.tokens):>6.0f} tok/step   reward {statistics.mean(measured.rewards):.2f}"
        + (f"   ({phases})" if phases else "")
    )


def report(sides: dict[str, list[Measured]], workload: Workload) -> None:
    """Print the table, the ratio of the best settings, and the floor."""
    best = {side: max(settings, key=lambda measured: measured.tokens_per_second) for side, settings in sides.items() if settings}
    print(
        f"\n{workload.model}: {workload.prompts_per_step} × {workload.num_generations}, {workload.max_completion_length} tokens, beta {workload.beta}"
    )
    for settings in sides.values():
        for measured in settings:
            print(describe(measured))
    if len(best) == 2:
        ours, trl = best["ours"], best["trl"]
        speed, memory = ours.tokens_per_second / trl.tokens_per_second, ours.peak_mb / trl.peak_mb
        print(f"ratio at the best setting of each: {speed:.2f} times the tokens/s, {memory:.2f} of the memory")
    for side, measured in best.items():
        floor = run_floor(workload, statistics.mean(measured.tokens))
        rate, bandwidth = floor["rates"][floor["dtype"]] / 1e9, floor["bandwidth"] / 1e9
        print(
            f"floor of {side}'s tokens: {floor['seconds']:.3f} s a step ({rate:.0f} GFLOP/s in {floor['dtype']}, {bandwidth:.0f} GB/s); "
            f"{measured.label} takes {measured.median_seconds / floor['seconds']:.2f} times that"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="quickstart, smollm2, or a model folder (default: quickstart)")
    parser.add_argument(
        "--smollm2", type=Path, default=Path("build/smollm2"), help="where `smollm2.py fetch` wrote (default: build/smollm2)"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps a process, after 2 of warm-up (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, help="times each process is run, the sides in turn (default: 1)")
    parser.add_argument("--dtype", choices=["bf16", "float32", "both"], default="both", help="bf16 autocast or float32 (default: both)")
    parser.add_argument("--sides", choices=["ours", "trl", "both"], default="both")
    parser.add_argument("--continuous-batching", action="store_true", help="let TRL generate with transformers' continuous batching")
    parser.add_argument("--threads", type=int, help="CPU threads of TRL's process (default: its own choice); ours decides for itself")
    arguments = parser.parse_args()

    workload = find_workload(arguments.model, smollm2=arguments.smollm2)
    dtypes = list(DTYPES) if arguments.dtype == "both" else [arguments.dtype]
    wanted = ["ours", "trl"] if arguments.sides == "both" else [arguments.sides]
    if "trl" in wanted and importlib.util.find_spec("trl") is None:
        print("TRL is not installed (pip install trl==1.16.0): only our side is measured.")
        wanted.remove("trl")

    sides = {side: [Measured(label=f"{side} {dtype}", bf16=DTYPES[dtype]) for dtype in dtypes] for side in wanted}
    for _ in range(arguments.rounds):
        for i in range(len(dtypes)):
            if "ours" in sides:
                run_ours(workload, sides["ours"][i], steps=arguments.steps)
            if "trl" in sides:
                run_trl(
                    workload,
                    sides["trl"][i],
                    steps=arguments.steps,
                    continuous_batching=arguments.continuous_batching,
                    threads=arguments.threads,
                )
    report(sides, workload)


if __name__ == "__main__":
    main()
