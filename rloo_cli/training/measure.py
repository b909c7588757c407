"""A few steps of the real run, timed: what `rloo plan --measure` projects from.

The run is training's own, assembled as `train` does it, and its optimizer steps are real ones, of weights that nobody keeps: only so are
the optimizer's time and memory in it. The first batch pays for what is set up once and is left out, unless it alone took so long that
this does not matter.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rloo_cli.recipe.batch import BatchPlan
from rloo_cli.training.inputs import TrainingInputs
from rloo_cli.training.train import assemble
from rloo_cli.training.training_run import TrainingRun

FEW_ROWS = {"cpu": 64, "cuda": 256}
"""Completions of the first batch, at least a group; where a whole batch would take too long, of every batch."""
MOST_SECONDS = 30.0
"""After which no further batch is begun."""
MOST_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A generation batch and all optimizer steps that it served; seconds of wall time."""

    prompts: int
    completions: int
    """Sampled, those left out by dynamic sampling included."""
    tokens: int
    """Of the completions."""
    truncated: float
    """Share of the completions that were cut off at the length limit."""
    generate: float
    reward: float
    train: float
    """Passes with and without gradient, and optimizer steps."""
    sync: float
    total: float
    rows: int
    """That the optimizer steps had, counted at each step."""
    skipped: int
    """Of these, left out of the pass since their gradient is 0."""
    rollout_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured."""

    batches: tuple[Batch, ...]
    """At least one, all of the same size."""
    batch_prompts: int
    """Prompts of a whole generation batch."""
    uses: int
    """Optimizer steps that a generation batch serves."""
    overlaps: bool
    """Whether a batch is sampled while the one before trains."""
    load_seconds: float
    peak_bytes: int
    """Of the device; on a CPU what the process took beyond what it had before the model was loaded."""


def measure(inputs: TrainingInputs) -> Measurement:
    """Times, tokens and memory of a few generation batches and the optimizer steps that they serve.

    Raises:
        RlooError: as training's first steps would.
    """
    memory = _Memory()
    with ExitStack() as stack:
        started = time.perf_counter()
        with inputs.progress.phase("load model"):
            run = assemble(inputs, stack)
            stack.callback(run.close)
        load_seconds = time.perf_counter() - started
        batches = _batches(run, inputs)
        peak = memory.peak(run.updater.accelerator.device)
    size = batches[-1].prompts
    measured = tuple(batch for batch in batches[1:] or batches if batch.prompts == size)
    return Measurement(
        batches=measured,
        batch_prompts=inputs.batch.prompts_per_generation,
        uses=inputs.batch.uses,
        overlaps=inputs.recipe.training.async_steps > 0,
        load_seconds=load_seconds,
        peak_bytes=peak,
    )


def _batches(run: TrainingRun, inputs: TrainingInputs) -> list[Batch]:
    """The first batch, which may be a small one, and others while there is time; of one size where the next is begun before the last is done with."""
    whole, is_fixed = inputs.batch, inputs.recipe.training.async_steps > 0
    few = _cut(whole, FEW_ROWS["cuda" if torch.cuda.is_available() else "cpu"])
    begun, batches = time.perf_counter(), list[Batch]()
    while len(batches) < MOST_BATCHES and time.perf_counter() - begun < MOST_SECONDS:
        is_affordable = (
            bool(batches) and not is_fixed and batches[0].total * whole.prompts_per_generation / few.prompts_per_generation < MOST_SECONDS
        )
        batch = whole if is_affordable else few
        run.inputs = replace(inputs, batch=batch, total_steps=max(inputs.total_steps, MOST_BATCHES * whole.uses + 1))
        batches.append(_batch(run, batch))
    return batches


def _cut(batch: BatchPlan, rows: int) -> BatchPlan:
    """The batch plan with about so many completions a generation batch, a prompt for each of its optimizer steps at least."""
    k = batch.steps_per_generation_batch
    prompts = min(batch.prompts_per_generation, max(k, rows // batch.num_generations // k * k))
    return replace(
        batch,
        prompts_per_generation=prompts,
        prompts_per_step=prompts // k,
        completions_per_step=prompts // k * batch.num_generations,
    )


def _batch(run: TrainingRun, batch: BatchPlan) -> Batch:
    """Sample one generation batch and make every optimizer step that it serves."""
    folder, first = run.inputs.folder, run.step + 1
    for _ in range(batch.uses):
        run.next_batch()
        run.update()
        run.sync_weights()
        run.record()
    rows = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()][-batch.uses :]
    head, group = rows[0], batch.num_generations
    prompts = batch.prompts_per_generation
    completions = round(prompts - head.get("groups/missing", 0) + head.get("groups/dropped", 0)) * group
    return Batch(
        prompts=prompts,
        completions=completions,
        tokens=round(head["completions/mean_length"] * completions),
        truncated=head["completions/clipped_ratio"],
        generate=head["perf/seconds/generate"],
        reward=head["perf/seconds/reward"],
        train=_sum(rows, "perf/seconds/train") + _sum(rows, "perf/seconds/reference"),
        sync=_sum(rows, "perf/seconds/sync"),
        total=_sum(rows, "perf/seconds/step"),
        rows=batch.num_iterations * prompts * group,
        skipped=round(_sum(rows, "rows/skipped")),
        rollout_bytes=folder.rollout_file(first).stat().st_size,
    )


def _sum(rows: Sequence[dict[str, float]], key: str) -> float:
    return sum(row.get(key, 0.0) for row in rows)


class _Memory:
    """The process's resident memory now, to be compared with its later peak."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # forget an earlier peak, such as reading the data
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def peak(self, device: torch.device) -> int:
        """Bytes: of a GPU all that was allocated, on a CPU beyond what there was before."""
        if device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(device))
        return _status("VmHWM") - self._before


def _status(key: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
