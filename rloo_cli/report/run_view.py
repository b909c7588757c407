"""A run folder as a report sees it: whatever of it can be read, and words about what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rloo_cli.errors import RefusedError
from rloo_cli.inspect.metric_rows import MetricRows, read_metric_rows
from rloo_cli.inspect.rollout_files import RolloutFile, find_rollouts
from rloo_cli.inspect.run_attempts import read_attempts
from rloo_cli.inspect.run_state import distinct_names, lock_holder, read_environment
from rloo_cli.inspect.stored import run_recipe
from rloo_cli.inspect.words import plural
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.folder import RunFolder

RunStateName = Literal["finished", "under way", "not finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a report needs of a run."""

    folder: RunFolder
    name: str
    """Of the folder; unique in its report."""
    state: RunStateName
    metrics: MetricRows
    files: tuple[RolloutFile, ...]
    recipe: Recipe | None
    """As resolved; None where it cannot be read."""
    environment: Mapping[str, Any]
    total_steps: int | None
    """Of the whole run; None where nothing says."""
    ending: str
    """Why the last attempt ended; empty where nothing says, or all went well."""
    gaps: tuple[str, ...]
    """Sentences about what is missing or damaged."""


def view_runs(paths: Sequence[Path]) -> list[RunView]:
    """The runs in these folders, with names that tell them apart.

    Raises:
        RefusedError: a folder holds no run, or nothing of it yet.
    """
    folders = list(dict.fromkeys(path.resolve() for path in paths))
    return [_view(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True)]


def _view(path: Path, name: str) -> RunView:
    folder = RunFolder(path)
    if not path.is_dir():
        raise RefusedError(f"{path} is no run folder: give the folder that holds metrics.jsonl.")
    metrics = read_metric_rows(folder.metrics)
    files, gaps = _files(folder)
    if not metrics.train and not metrics.evaluations and not files:
        raise RefusedError(
            f"{path} holds neither metrics nor rollouts: there is nothing to report yet. {folder.logs} tells how far it came."
        )
    recipe, environment = _recipe(folder.recipe), read_environment(folder)
    total = environment.get("total_steps")
    return RunView(
        folder=folder,
        name=name,
        state=_state(folder),
        metrics=metrics,
        files=tuple(files),
        recipe=recipe,
        environment=environment,
        total_steps=total if isinstance(total, int) else None,
        ending=_ending(folder),
        gaps=(*_metric_gaps(folder, metrics), *gaps, *_other_gaps(recipe, environment)),
    )


def _files(folder: RunFolder) -> tuple[list[RolloutFile], list[str]]:
    try:
        return find_rollouts(folder.path), []
    except RefusedError:
        return [], ["There are no rollouts."]


def _state(folder: RunFolder) -> RunStateName:
    if folder.finished_step() is not None:
        return "finished"
    return "under way" if lock_holder(folder) else "not finished"


def _ending(folder: RunFolder) -> str:
    cause = attempts[-1].cause if (attempts := read_attempts(folder)) else None
    return cause.reason if cause is not None and not cause.is_neighbour else ""


def _recipe(path: Path) -> Recipe | None:
    """The recipe; also where the data or the model that it names are not on this machine, which loading it would refuse."""
    try:
        return run_recipe(path) or Recipe.model_validate(yaml.safe_load(path.read_bytes()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None


def _metric_gaps(folder: RunFolder, metrics: MetricRows) -> list[str]:
    if not folder.metrics.is_file():
        return ["There is no metrics.jsonl, so there are no curves."]
    damaged = metrics.damaged_lines
    lost = [f"{plural(damaged, 'line')} of metrics.jsonl cannot be read."] if damaged else []
    return [*lost, *([] if metrics.train else ["metrics.jsonl holds no training step."])]


def _other_gaps(recipe: Recipe | None, environment: Mapping[str, Any]) -> list[str]:
    gaps = [] if recipe is not None else ["recipe.yaml cannot be read."]
    return [*gaps, *([] if environment else ["environment.json cannot be read."])]
