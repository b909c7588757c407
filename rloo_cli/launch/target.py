"""Which run folder a command means, decided before anything is loaded and without touching it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from rloo_cli.errors import RefusedError
from rloo_cli.run.checkpoint import refuse_absent, step_name
from rloo_cli.run.folder import RunFolder, RunState, default_run_path, open_existing, open_new

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run folder and what is to happen in it."""

    folder: RunFolder
    resume: Literal["latest"] | int | Path | None
    """The checkpoint to go on from; None for a new run."""
    finished: bool = False
    """The run came to its end: there is nothing left to do, unless the recipe asks for more now."""


def choose_target(*, recipe_name: str, output_dir: str | None, resume: str | None, now: datetime) -> Target:
    """The run that is meant.

    Args:
        recipe_name: the recipe file's stem, which names default folders.
        output_dir: from the command line, else from the recipe.
        resume: what `--resume` was given: None, `latest`, `auto`, a step, or the path of a checkpoint.
        now: the time that a default folder carries in its name.

    Raises:
        RefusedError: a new run was asked for in a folder that holds something, or there is nothing to resume, or no such step.
        StorageError: the folder cannot be looked into, or a run is under way in it.
    """
    if resume is None:
        return Target(folder=open_new(Path(output_dir) if output_dir else default_run_path(recipe_name, now)), resume=None)
    if resume == "auto":
        return _auto(output_dir)
    if resume == "latest" or resume.isdecimal():
        folder = open_existing(Path(output_dir) if output_dir else newest_run(recipe_name))
        return _at_step(folder, int(resume)) if resume.isdecimal() else _latest(folder)
    return _from_path(Path(resume), output_dir)


def newest_run(recipe_name: str, root: Path = RUNS) -> Path:
    """The newest run of a recipe among those with a default name.

    Raises:
        RefusedError: there is none.
    """
    pattern = re.compile(re.escape(recipe_name) + r"-\d{8}-\d{6}")
    names = sorted(path.name for path in root.iterdir() if pattern.fullmatch(path.name)) if root.is_dir() else []
    if not names:
        raise RefusedError(f"no run of {recipe_name} below {root}/ to go on with: name its folder by --output-dir.")
    return root / names[-1]


def _auto(output_dir: str | None) -> Target:
    if output_dir is None:
        raise RefusedError("--resume=auto needs a folder to look in: name it by --output-dir or run.output_dir.")
    folder = RunFolder(Path(output_dir))
    return Target(folder=folder, resume=None) if folder.state() is RunState.NEW else _latest(folder)


def _latest(folder: RunFolder) -> Target:
    return Target(folder=folder, resume="latest", finished=folder.state() is RunState.FINISHED)


def _at_step(folder: RunFolder, step: int) -> Target:
    refuse_absent(folder.checkpoints / step_name(step), folder.checkpoints)
    return Target(folder=folder, resume=step)


def _from_path(path: Path, output_dir: str | None) -> Target:
    if not path.is_dir():
        raise RefusedError(f"--resume={path}: no such folder. Give a checkpoint's folder, a step number, or nothing for the latest.")
    if (path / "recipe.yaml").is_file():  # a run folder was meant
        return _latest(open_existing(path))
    run = Path(output_dir) if output_dir else path.resolve().parent.parent
    return Target(folder=open_existing(run), resume=path)
