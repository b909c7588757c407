"""What a training gives back to the program that asked for it, read from the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.run.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """How a training ended."""

    run_folder: Path
    """With metrics.jsonl, rollouts/, checkpoints/ and final/."""
    global_step: int
    """The last optimizer step."""
    training_loss: float | None
    """Of that step."""
    metrics: Mapping[str, float]
    """The row of that step; docs/metrics.md tells what each means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far a run has come."""

    global_step: int
    log_history: tuple[Mapping[str, float], ...]
    """Every row of metrics.jsonl, those of evaluations too."""


def read_state(folder: RunFolder | None) -> TrainerState:
    """The state of a run; of none, step 0."""
    text = folder.metrics.read_text(encoding="utf-8") if folder is not None and folder.metrics.is_file() else ""
    rows = tuple(json.loads(line) for line in text.splitlines())
    return TrainerState(global_step=max((int(row["step"]) for row in rows), default=0), log_history=rows)


def read_output(folder: RunFolder) -> TrainOutput:
    """The last training row of a run."""
    rows = [row for row in read_state(folder).log_history if not any(key.startswith("eval/") for key in row)]
    last = rows[-1] if rows else {}
    return TrainOutput(run_folder=folder.path, global_step=int(last.get("step", 0)), training_loss=last.get("loss"), metrics=last)
