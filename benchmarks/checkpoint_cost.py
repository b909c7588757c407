"""What a checkpoint costs, by part, and what reward workers add to a step: a real run of the program with its file calls timed.

    python benchmarks/checkpoint_cost.py                     # the quickstart model
    python benchmarks/checkpoint_cost.py --model smollm2     # SmolLM2-135M: 1.6 GB with the optimizer's state
    python benchmarks/checkpoint_cost.py --model smollm2 --step-seconds 20     # saves alone, on tiny steps

A checkpoint is saved after every step. The share of training time is that of one save in `--save-steps` steps. Writing is into the page
cache, fsync is what the disk still had to do then. Times alone say nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer import write_recipe
from workload import find_workload

WARM_UP = 1
PARTS = ("hash", "write", "fsync", "rename", "delete")


class Clock:
    """Seconds by part of the save under way."""

    def __init__(self) -> None:
        self.saves: list[dict[str, float]] = []
        self._parts: dict[str, float] = collections.defaultdict(float)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its seconds counted as `part`."""

        def wrapper(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._parts[part] += time.perf_counter() - started

        return wrapper

    @contextmanager
    def save(self) -> Iterator[None]:
        """One save."""
        self._parts.clear()
        started = time.perf_counter()
        yield
        self.saves.append({**self._parts, "total": time.perf_counter() - started})


def watch(clock: Clock) -> None:
    """Time the program's file calls, its hashing, and each save as a whole."""
    from rloo_cli.run import atomic, manifest

    class TimedFiles(atomic.FileSystem):
        write = staticmethod(clock.timed("write", os.write))
        fsync = staticmethod(clock.timed("fsync", os.fsync))
        rename = staticmethod(clock.timed("rename", os.rename))
        unlink = staticmethod(clock.timed("delete", os.unlink))  # of checkpoints beyond save_total_limit

    atomic.fs = TimedFiles()
    manifest.Digest.update = clock.timed("hash", manifest.Digest.update)  # type: ignore[method-assign]
    manifest.Digest.entry = clock.timed("hash", manifest.Digest.entry)  # type: ignore[method-assign]
    watch_saves(clock)


def watch_saves(clock: Clock) -> None:
    """Count each save of a run that wrote something."""
    from rloo_cli.training.training_run import TrainingRun

    save = TrainingRun.save

    def timed_save(run: TrainingRun) -> None:
        if run.step in (0, run.saved_step):
            return save(run)
        with clock.save():
            return save(run)

    TrainingRun.save = timed_save  # type: ignore[method-assign]


def report(clock: Clock, rows: Sequence[dict[str, float]], size: int, *, save_steps: int, step_seconds: float | None) -> None:
    """Print the table."""
    saves, steps = clock.saves[WARM_UP:], rows[WARM_UP:]
    total = statistics.median(save["total"] for save in saves)
    step = step_seconds or statistics.median(row["perf/seconds/step"] for row in steps)
    print(f"\ncheckpoint of {size / 1e6:.1f} MB, median of {len(saves)} saves (fastest, slowest)")
    for part in (*PARTS, "the rest", "total"):
        seconds = [save["total"] - sum(save.get(p, 0.0) for p in PARTS) if part == "the rest" else save.get(part, 0.0) for save in saves]
        print(f"  {part:<9}{statistics.median(seconds):8.3f} s   ({min(seconds):.3f}, {max(seconds):.3f})")
    print("  the rest: gathering tensors, serialising them, folders and the manifest")
    print(
        f"a step takes {step:.3f} s: a save every {save_steps} steps is {100 * total / (save_steps * step + total):.2f} % of training time"
    )
    if step_seconds is not None:
        return
    generate, reward = (statistics.median(row[f"perf/seconds/{name}"] for row in steps) for name in ("generate", "reward"))
    print(
        f"rewards: {1000 * reward:.1f} ms a step after sampling, which takes {1000 * generate:.0f} ms ({100 * reward / step:.2f} % of a step)"
    )


def main() -> int:
    """The exit code of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="quickstart, smollm2, or a model folder (default: quickstart)")
    parser.add_argument("--steps", type=int, default=5, help="steps, and saves; the first is not counted (default: 5)")
    parser.add_argument(
        "--save-steps", type=int, default=None, metavar="N", help="for the share of training time (default: the recipes' own)"
    )
    parser.add_argument(
        "--step-seconds", type=float, metavar="S", help="what a step takes: then tiny steps are made, and saves alone are measured"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to write, for another disk (default: the temporary folder)")
    arguments = parser.parse_args()
    workload = find_workload(arguments.model)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        recipe = write_recipe(workload, folder, steps=arguments.steps, bf16=False)
        command = ["train", str(recipe), "--set", "save_strategy=steps", "--set", "save_steps=1", "--set", "save_total_limit=2"]
        if arguments.step_seconds is not None:
            command += ["--set", "prompts_per_step=1", "--set", "num_generations=2", "--set", "max_completion_length=4"]
        clock = Clock()
        code = run(command, clock)
        if code:
            return code
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        newest = max((folder / "run" / "checkpoints").glob("[0-9]*"))
        size = sum(file.stat().st_size for file in newest.iterdir())
        report(clock, rows, size, save_steps=arguments.save_steps or default_save_steps(), step_seconds=arguments.step_seconds)
    return 0


def run(command: list[str], clock: Clock) -> int:
    """Run the program in this process. Reward workers start before torch is imported, so saves are watched once it is."""
    from rloo_cli.cli.app import exit_code_of
    from rloo_cli.launch import local

    train = local._train

    def train_watched(*arguments: Any, **options: Any) -> None:
        watch(clock)
        train(*arguments, **options)

    local._train = train_watched
    sys.argv = ["rloo", *command]
    return exit_code_of(command)


def default_save_steps() -> int:
    """Steps between saves where a recipe says nothing."""
    from rloo_cli.recipe.schema import RunSection

    return int(RunSection().save_steps)


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(main())
