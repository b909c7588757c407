"""Two processes against one on the CPUs of this machine: the same global batch, one thread each, strategy by strategy.

    python benchmarks/processes.py                                 # all workloads, all strategies; about eight minutes
    python benchmarks/processes.py --models large --strategies ddp fsdp2

All sides are started first, then they take turns step by step: a round is one step of every side, so that whatever else loads the machine
meets all alike. A figure is the median over rounds of (tokens/s of the side) / (tokens/s of one process in the same round); the load beside it
says what else ran. Nothing is gained where the machine has one core, or something else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "recipes" / "quickstart"
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
WARM_UP = 1
START_SECONDS = 240
STEP_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every side does in a step."""

    prompts_per_step: int
    num_generations: int
    max_completion_length: int


WORK = {
    "quickstart": Work(prompts_per_step=16, num_generations=8, max_completion_length=48),
    "large": Work(prompts_per_step=8, num_generations=4, max_completion_length=32),
    "large-batch": Work(prompts_per_step=16, num_generations=8, max_completion_length=32),
}
"""The last two have the same model. With 32 completions a step, half of it is what two processes do not share out: each reads all weights for
every token that it samples, and 176 MB of gradient are summed. With 128, as many as the quickstart's, that weighs less."""


@dataclass(slots=True, kw_only=True)
class Side:
    """One command, its processes, and what was measured."""

    name: str
    processes: int
    folder: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start it; it goes on until its first gate."""
        (self.folder / "gate").mkdir()
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def release(self, step: int) -> float:
        """Let it go on with a step; returns when that was."""
        now = time.monotonic()
        (self.folder / "gate" / f"release-{step}").touch()
        return now

    def wait(self, step: int, seconds: float) -> tuple[int, float]:
        """(tokens of the step's batch, when its last process came to the gate).

        Raises:
            SystemExit: it ended, or did not come.
        """
        assert self.process is not None
        arrivals = [self.folder / "gate" / f"arrived-{step}-{rank}" for rank in range(self.processes)]
        deadline = time.monotonic() + seconds
        while not all(path.exists() for path in arrivals):
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = "".join((self.folder / "output").read_text(errors="replace").splitlines(keepends=True)[-20:])
                raise SystemExit(f"{self.name}: {' '.join(self.command)}\ndid not come to step {step}:\n{tail}")
            time.sleep(0.002)
        said = [path.read_text().split() for path in arrivals]
        return sum(int(tokens) for tokens, _ in said), max(float(when) for _, when in said)

    def end(self) -> None:
        """Let it end, or end it."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout=START_SECONDS / 4)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 14,
}
"""What the large models have instead of the quickstart model's: products that take most of the time."""


def write_model(name: str, folder: Path) -> int:
    """Write model and tokenizer into `folder`; returns the number of parameters. Weights are random: only their sizes matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(QUICKSTART / "model", folder)
    (folder / "model.safetensors").unlink(missing_ok=True)
    path = folder / "config.json"
    if name != "quickstart":
        path.write_text(json.dumps(json.loads(path.read_text()) | LARGE))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def make_side(name: str, model: Path, work: Work, folder: Path, *, steps: int, strategy: str, processes: int) -> Side:
    """A side with its recipe, not started. JSON is YAML."""
    folder.mkdir()
    shutil.copy(HERE / "turns.py", folder)
    recipe = {
        "model": {"model_name_or_path": str(model), "random_weights": True},
        "data": {"dataset_name": str(QUICKSTART / "data" / "train.jsonl")},
        "rewards": [{"function": "turns.reward", "kwargs": {"gate": str(folder / "gate")}, "run_in": "trainer", "call": "batch"}],
        "generation": {"num_generations": work.num_generations, "max_completion_length": work.max_completion_length},
        "algorithm": {"beta": 0.0},
        "training": {
            "prompts_per_step": work.prompts_per_step,
            "max_steps": steps,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "gradient_checkpointing": False,
            "threads": 1,
        },
        "run": {
            "output_dir": str(folder / "run"),
            "save_strategy": "no",
            "num_processes": processes,
            "accelerate_config": strategy,
            "reward_workers": 1,
        },
    }
    (folder / "side.yaml").write_text(json.dumps(recipe, indent=2))
    command = [sys.executable, "-m", "rloo_cli", "train", str(folder / "side.yaml"), "--quiet"]
    return Side(name=name, processes=processes, folder=folder, command=command)


@contextmanager
def running(sides: Sequence[Side]) -> Iterator[None]:
    """Start all sides, wait until each has sampled its first batch, and leave none behind."""
    try:
        for side in sides:
            side.start()
        for side in sides:
            side.wait(0, START_SECONDS)
        yield
    except BaseException:
        for side in sides:
            if side.process is not None and side.process.poll() is None:
                os.killpg(side.process.pid, signal.SIGKILL)
        raise
    finally:
        for side in sides:
            side.end()


def take_turns(sides: Sequence[Side], rounds: int) -> None:
    """One step of each side in turn, `rounds` times after the warm-up, the order turned round each time."""
    for step in range(WARM_UP + rounds):
        for side in sides if step % 2 == 0 else reversed(sides):
            started = side.release(step)
            tokens, arrived = side.wait(step + 1, STEP_SECONDS)
            if step >= WARM_UP:
                side.tokens.append(tokens)
                side.seconds.append(arrived - started)
    for side in sides:
        side.release(WARM_UP + rounds)


def figures(sides: Sequence[Side]) -> list[dict[str, float | str]]:
    """Tokens/s and the ratio to the first side, medians over rounds."""
    speeds = [[tokens / seconds for tokens, seconds in zip(side.tokens, side.seconds, strict=True)] for side in sides]
    found = []
    for side, speed in zip(sides, speeds, strict=True):
        ratios = [own / one for own, one in zip(speed, speeds[0], strict=True)]
        found.append(
            {
                "side": side.name,
                "seconds_per_step": statistics.median(side.seconds),
                "tokens_per_second": statistics.median(speed),
                "ratio": statistics.median(ratios),
                "least_ratio": min(ratios),
                "largest_ratio": max(ratios),
            }
        )
    return found


def measure(name: str, strategies: Sequence[str], rounds: int) -> dict[str, object]:
    """One model: all sides, and the load before and after."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write_model(name, folder / "model")
        steps = WARM_UP + rounds + 1
        sides = [make_side("1 process", folder / "model", WORK[name], folder / "one", steps=steps, strategy="ddp", processes=1)]
        for strategy in strategies:
            label = f"2 processes, {strategy}"
            sides.append(make_side(label, folder / "model", WORK[name], folder / strategy, steps=steps, strategy=strategy, processes=2))
        before = os.getloadavg()[0]
        with running(sides):
            turns_before = os.getloadavg()[0]
            take_turns(sides, rounds)
            after = os.getloadavg()[0]
        return {
            "model": name,
            "parameters": parameters,
            "work": asdict(WORK[name]),
            "rounds": rounds,
            "load": {"before": before, "at first turn": turns_before, "after": after},
            "sides": figures(sides),
        }


def report(result: dict[str, object]) -> None:
    """Print the table."""
    work, load = WORK[str(result["model"])], result["load"]
    assert isinstance(load, dict)
    print(
        f"\n{result['model']}: {int(str(result['parameters'])) / 1e6:.1f} M parameters, {work.prompts_per_step} × {work.num_generations} completions of "
        f"at most {work.max_completion_length} tokens, {result['rounds']} rounds; load of the last minute {load['before']:.1f} before, "
        f"{load['after']:.1f} after, of which this is about 2"
    )
    sides = result["sides"]
    assert isinstance(sides, list)
    for side in sides:
        print(
            f"  {side['side']:<22}{side['seconds_per_step']:>8.2f} s/step{side['tokens_per_second']:>8.0f} tok/s   "
            f"{side['ratio']:.2f} of one process ({side['least_ratio']:.2f} to {side['largest_ratio']:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side that are measured, after one of warm-up (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document, after the tables")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no side is left behind
    results = []
    for name in arguments.models:
        results.append(measure(name, arguments.strategies, arguments.rounds))
        report(results[-1])
    if arguments.json:
        print(json.dumps({"cores": os.cpu_count(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
