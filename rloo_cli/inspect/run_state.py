"""Runs in a folder, and what can be said of each on a line: state, step, rewards, when and how long. No damage makes it fail."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from rloo_cli.errors import LostRankError, RefusedError, RlooError, StorageError
from rloo_cli.inspect.metric_rows import MetricRows, read_metric_rows
from rloo_cli.inspect.run_attempts import STOPPED, Attempt, read_attempts
from rloo_cli.inspect.series import Series
from rloo_cli.inspect.stored import run_recipe
from rloo_cli.recipe.schema import Recipe
from rloo_cli.run.folder import ATTEMPT_NAME, RunFolder
from rloo_cli.run.lock import ensure_unlocked
from rloo_cli.run.metrics import evaluation_key

LEVELS = 3
"""How deep below the folder runs are looked for."""
SIGNS = ("metrics.jsonl", "environment.json", "run.json", "checkpoints", "final", "logs")
"""What a run has beside its recipe.yaml; a recipe's own folder has none of it."""


class StateName(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By a signal; what was done is saved."""
    FAILED = "failed"
    DIED = "died"
    """It ended without a word: killed, or the machine went down."""
    EMPTY = "empty"
    """Nothing of it says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run on a line."""

    path: Path
    state: StateName
    exit_code: int | None
    reason: str
    """Why it failed or stopped, or who runs it; a line."""
    step: int
    """The last optimizer step that metrics or the final model tell of."""
    total_steps: int | None
    reward: float | None
    """Of the last step."""
    evaluation: float | None
    """`eval/reward`, or what `metric_for_best_model` names, of the last evaluation."""
    best: float | None
    """The best of those."""
    best_step: int | None
    started: datetime | None
    seconds: float | None
    """Over all attempts, while they ran."""
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that is read of a run to tell of it."""

    folder: RunFolder
    summary: RunSummary
    metrics: MetricRows
    attempts: tuple[Attempt, ...]
    recipe: Recipe | None
    environment: Mapping[str, Any]


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder and its sub-folders, or the folder itself where it is one.

    Raises:
        RefusedError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise RefusedError(f"{folder}: no such folder; give one that holds runs, or a run.")
    found = sorted(_below(folder, LEVELS))
    if not found:
        raise RefusedError(f"{folder} holds no runs: `rloo train` writes them to runs/ unless --output-dir says otherwise.")
    return found


def is_run(path: Path) -> bool:
    """Whether a run left this folder."""
    try:
        has_recipe = (path / "recipe.yaml").is_file() and any((path / sign).exists() for sign in SIGNS)
        return has_recipe or any(ATTEMPT_NAME.fullmatch(entry.name) for entry in (path / "logs").iterdir())
    except OSError:
        return False


def read_facts(path: Path, *, now: datetime) -> RunFacts:
    """All that can be read of a run.

    Raises:
        RefusedError: the folder is none.
    """
    if not is_run(path):
        raise RefusedError(f"{path} is no run folder (no recipe.yaml with metrics or logs beside it, no logs/attempt-1).")
    folder = RunFolder(path)
    metrics, attempts = read_metric_rows(folder.metrics), tuple(read_attempts(folder))
    recipe, environment = run_recipe(folder.recipe.absolute()), read_environment(folder)
    return RunFacts(
        folder=folder,
        summary=_summary(folder, metrics, attempts, recipe, environment, now),
        metrics=metrics,
        attempts=attempts,
        recipe=recipe,
        environment=environment,
    )


def read_environment(folder: RunFolder) -> dict[str, Any]:
    """What environment.json says; empty where it cannot be read."""
    try:
        document = json.loads(folder.environment.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    >>> distinct_names([Path("/a/x/run"), Path("/a/y/run")])
    ['x/run', 'y/run']
    """
    parts = [path.absolute().parts for path in paths]
    longest = max(len(each) for each in parts)
    ends = (["/".join(each[-length:]) for each in parts] for length in range(1, longest + 1))
    return next((names for names in ends if len(set(names)) == len(names)), [str(path) for path in paths])


def _below(folder: Path, levels: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    if not levels:
        return
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return
    for entry in entries:
        yield from _below(entry, levels - 1)


def _summary(
    folder: RunFolder,
    metrics: MetricRows,
    attempts: tuple[Attempt, ...],
    recipe: Recipe | None,
    environment: Mapping[str, Any],
    now: datetime,
) -> RunSummary:
    finished = _finished_step(folder)
    state, exit_code, reason = _state(folder, attempts, finished)
    evaluations = metrics.series(metric_key(recipe))
    best = evaluations.best(greater=recipe is None or recipe.run.greater_is_better is not False)
    total = environment.get("total_steps")
    return RunSummary(
        path=folder.path,
        state=state,
        exit_code=exit_code,
        reason=reason,
        step=max(metrics.last_step, finished or 0),
        total_steps=total if isinstance(total, int) and not isinstance(total, bool) else None,
        reward=_last(metrics.series("reward")),
        evaluation=_last(evaluations),
        best=best[1] if best is not None else None,
        best_step=best[0] if best is not None else None,
        started=attempts[0].started if attempts else None,
        seconds=_seconds(folder, attempts, state, now),
        attempts=len(attempts),
    )


def _last(series: Series) -> float | None:
    return series.values[-1] if series else None


def metric_key(recipe: Recipe | None) -> str:
    """The key by which evaluations of the run are told from each other."""
    wanted = recipe.run.metric_for_best_model if recipe is not None else None
    return evaluation_key(wanted or "reward")


def _finished_step(folder: RunFolder) -> int | None:
    try:
        return folder.finished_step()
    except (OSError, RlooError):
        return None


def _state(folder: RunFolder, attempts: tuple[Attempt, ...], finished: int | None) -> tuple[StateName, int | None, str]:
    """(state, exit code of the last attempt, reason)."""
    if holder := lock_holder(folder):
        return StateName.RUNNING, None, holder
    cause = attempts[-1].cause if attempts else None
    if finished is not None and (cause is None or not cause.exit_code):
        return StateName.FINISHED, 0, ""
    if cause is None:
        return (StateName.DIED if attempts else StateName.EMPTY), None, "it left no word of how it ended" if attempts else ""
    if cause.is_silent:
        return StateName.DIED, LostRankError.exit_code, cause.reason
    if cause.is_neighbour:
        return StateName.DIED, cause.exit_code, f"a process left no word of how it ended; rank {cause.rank} then: {cause.reason}"
    if cause.exit_code == STOPPED:
        return StateName.STOPPED, STOPPED, cause.reason
    if cause.exit_code:
        return StateName.FAILED, cause.exit_code, cause.reason
    return StateName.FAILED, 0, "its last attempt ended well, but the final model is not there or damaged"


def lock_holder(folder: RunFolder) -> str:
    """Who uses the folder now, `pid 12 on host a`; empty where nobody does."""
    try:
        ensure_unlocked(folder.lock_file)
    except StorageError as error:
        _, found, rest = error.message.partition(" is locked by ")
        return rest.partition(":")[0] if found else ""
    return ""


def _seconds(folder: RunFolder, attempts: tuple[Attempt, ...], state: StateName, now: datetime) -> float | None:
    """Wall time of all attempts; the last one lasts until now, or until the last step that it told of where it ended without a word."""
    spans = [attempt.seconds for attempt in attempts[:-1] if attempt.seconds is not None]
    if attempts and (started := attempts[-1].started) is not None:
        ended = now if state is StateName.RUNNING else attempts[-1].ended
        if state is StateName.DIED:
            ended = max(filter(None, (ended, _modified(folder.metrics))), default=None)
        spans += [(ended - started).total_seconds()] if ended is not None else []
    return math.fsum(max(0.0, span) for span in spans) if spans else None


def _modified(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    except (OSError, ValueError, OverflowError):
        return None
