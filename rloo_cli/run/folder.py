"""The run folder: all of its paths, how a run takes hold of it, and what a dead run left in it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import psutil

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import step_name
from rloo_cli.run.disk_errors import advice
from rloo_cli.run.lock import Holder, ensure_unlocked, locked
from rloo_cli.run.manifest import MANIFEST_NAME, DamagedError, Manifest

logger = logging.getLogger(__name__)

ORPHAN_NAME = re.compile(r"\.tmp-.+-(\d+)")
ATTEMPT_NAME = re.compile(r"attempt-(\d+)")
CLOCK_TOLERANCE = 2.0
"""Seconds by which a process has to be younger than a file to have nothing to do with it."""


class RunState(StrEnum):
    """What a run folder holds."""

    NEW = "new"
    """Nothing yet."""
    STARTED = "started"
    """A run that has not ended."""
    FINISHED = "finished"
    """A run with its final model."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Every path of a run, below `path`."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as resolved."""
        return self.path / "recipe.yaml"

    @property
    def recipe_source(self) -> Path:
        """The recipe as written."""
        return self.path / "recipe.source.yaml"

    @property
    def environment(self) -> Path:
        """Versions, hardware, command."""
        return self.path / "environment.json"

    @property
    def identity(self) -> Path:
        """The run's id, which every checkpoint holds as well."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """A line per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """The folder of rollout files."""
        return self.path / "rollouts"

    @property
    def failed(self) -> Path:
        """The folder of batches that an update stopped at, since a number was not finite."""
        return self.path / "failed"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The final model, a plain transformers folder."""
        return self.path / "final"

    @property
    def inputs(self) -> Path:
        """Data and model that a Python program gave as objects, complete or absent."""
        return self.path / "inputs"

    @property
    def logs(self) -> Path:
        """The folder of attempts."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The page about the run, written at its end."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """The folder of tensorboard's event files."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """The ids under which trackers know this run."""
        return self.path / "trackers.json"

    @property
    def hub(self) -> Path:
        """Where on the hub the final model was uploaded to."""
        return self.path / "hub.json"

    @property
    def lock_file(self) -> Path:
        """Held while a run uses the folder."""
        return self.path / ".lock"

    def rollout_file(self, step: int) -> Path:
        """Where the rollouts of an optimizer step go."""
        return self.rollouts / f"{step_name(step)}.parquet"

    def eval_rollout_file(self, step: int) -> Path:
        """Where the rollouts of the evaluation after `step` go."""
        return self.rollouts / f"eval-{step_name(step)}.parquet"

    def failed_batch(self, step: int) -> Path:
        """Where the batch goes that the update of `step` stopped at, as rollouts; the facts lie beside it in a file of suffix `.json`."""
        return self.failed / f"step-{step_name(step)}.parquet"

    def attempt(self, number: int) -> Path:
        """The log folder of the n-th start of this run, from 1."""
        return self.logs / f"attempt-{number}"

    def attempts(self) -> int:
        """How many starts this run has seen."""
        names = (ATTEMPT_NAME.fullmatch(name) for name in _names(self.logs))
        return max((int(name[1]) for name in names if name), default=0)

    def new_attempt(self) -> Path:
        """The log folder of this start, just created."""
        folder = self.attempt(self.attempts() + 1)
        atomic.make_folder(folder)
        return folder

    def run_id(self) -> str | None:
        """The id that the first start gave the run; None where there is none that can be read."""
        try:
            document = json.loads(self.identity.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        found = document.get("id") if isinstance(document, dict) else None
        return found if isinstance(found, str) else None

    def finished_step(self) -> int | None:
        """The step of the final model, or None where the run has not ended."""
        try:
            manifest = Manifest.read(self.final)
            manifest.verify(self.final, contents=False)
        except DamagedError:
            return None
        step = manifest.info.get("step")
        return step if isinstance(step, int) else None

    def final_damage(self) -> str | None:
        """What is wrong with the final model, every byte of it looked at; None where it is whole, or not there."""
        if not self.final.exists():
            return None
        try:
            Manifest.read(self.final).verify(self.final)
        except DamagedError as damage:
            return str(damage)
        return None

    def has_begun(self) -> bool:
        """Whether there is more than attempts leave that ended before training: their logs, and folders with nothing in them yet."""
        passing = (self.lock_file, self.logs, self.rollouts, self.checkpoints, *([self.inputs] if self._has_inputs() else []))
        names = set(_names(self.path)) - {place.name for place in passing}
        strange = [name for name in _names(self.logs) if not ATTEMPT_NAME.fullmatch(name)]
        return bool(names or strange or _names(self.rollouts) or _names(self.checkpoints))

    def is_ours(self) -> bool:
        """Whether a run left what is there: it has a recipe.yaml, the logs of an attempt, inputs, or no more than a lock."""
        if self.recipe.exists() or self.attempts() > 0 or self._has_inputs():
            return True
        names = set(_names(self.path))
        return self.lock_file.name in names <= {self.lock_file.name, self.logs.name} and not _names(self.logs)

    def _has_inputs(self) -> bool:
        return (self.inputs / MANIFEST_NAME).is_file()

    def state(self) -> RunState:
        """What the folder holds.

        Raises:
            StorageError: a file stands there, or it cannot be listed.
            RefusedError: it holds files, but no run.
        """
        if not _names(self.path):
            return RunState.NEW
        if not self.is_ours():
            raise RefusedError(f"{self.path} holds files but no run of ours (no recipe.yaml): choose another --output-dir.")
        return RunState.STARTED if self.finished_step() is None else RunState.FINISHED

    def prepare(self) -> None:
        """Create the sub-folders and try to write in each, so that nothing fails first after hours.

        Raises:
            StorageError: one is read-only, or a file stands where a folder should be.
        """
        for folder in (self.path, self.rollouts, self.checkpoints, self.logs):
            atomic.make_folder(folder)
            probe = atomic.temporary_path(folder / "probe")  # a name that is nobody else's
            atomic.write_file(probe, b"")
            atomic.remove_file(probe)
        if self.final.exists() and not self.final.is_dir():
            raise StorageError(f"{self.final} is a file; the final model's folder has to go there: move it away.")
        for file in (self.recipe, self.recipe_source, self.environment, self.identity, self.metrics):
            if file.is_dir():
                raise StorageError(f"{file} is a folder; a file of that name has to go there: move it away.")

    @contextlib.contextmanager
    def lock(self) -> Iterator[Holder | None]:
        """Keep every other run out of the folder for the block, which gets the dead process whose lock was taken over, or None.

        Raises:
            StorageError: another run holds it, with its pid and host.
        """
        atomic.make_folder(self.path)
        with locked(self.lock_file) as dead:
            yield dead

    def remove_orphans(self) -> list[Path]:
        """The temporary files and folders (`.tmp-…-<pid>`) of dead processes, removed; nothing else is ever touched.

        To be called while the folder is locked.
        """
        places = [self.path, self.rollouts, self.failed, self.checkpoints, *(self.attempt(n + 1) for n in range(self.attempts()))]
        orphans = [entry for place in places if place.is_dir() for entry in sorted(place.iterdir()) if _is_orphan(entry)]
        for orphan in orphans:
            try:
                atomic.remove_tree(orphan)
            except StorageError as error:
                logger.warning("left over from a dead run: %s", error.message)
        return orphans


def default_run_path(recipe_name: str, now: datetime, root: Path = Path("runs")) -> Path:
    """`runs/<recipe>-<date>-<time>`, such as runs/quickstart-20260131-174501."""
    return root / f"{recipe_name}-{now:%Y%m%d-%H%M%S}"


def open_new(path: Path) -> RunFolder:
    """The folder of a new run; it does not exist yet, or holds at most the logs of attempts that failed before training.

    Raises:
        RefusedError: there is something in it; the message names --resume where a run can be gone on with.
        StorageError: a run is under way in it.
    """
    folder = RunFolder(path)
    state = folder.state()
    if state is not RunState.NEW:
        ensure_unlocked(folder.lock_file)
    if state is RunState.STARTED and folder.has_begun():
        raise RefusedError(f"{path} holds a run already: go on with it by --resume, or choose another --output-dir.")
    if state is RunState.FINISHED:
        raise RefusedError(f"{path} holds a finished run (step {folder.finished_step()}): choose another --output-dir.")
    return folder


def open_existing(path: Path) -> RunFolder:
    """The folder of a run to go on with, finished or not.

    Raises:
        RefusedError: there is no run.
    """
    folder = RunFolder(path)
    if folder.state() is RunState.NEW:
        raise RefusedError(f"{path} holds no run to go on with: leave --resume out to start one, or say --resume=auto.")
    return folder


def _names(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir()]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise StorageError(f"{path} is a file, and a folder has to stand there: move it away, or {advice().elsewhere}.") from None
    except OSError as error:
        raise StorageError(f"cannot look into {path}: {error.strerror}. Make it readable, or {advice().elsewhere}.") from error


def _is_orphan(path: Path) -> bool:
    """Whether it is a temporary of a process that is gone. Our own pid counts: we have written nothing yet (in a container pids repeat)."""
    match = ORPHAN_NAME.fullmatch(path.name)
    if match is None:
        return False
    try:
        process = psutil.Process(int(match[1]))
        return process.pid == os.getpid() or process.create_time() > path.lstat().st_mtime + CLOCK_TOLERANCE
    except (psutil.Error, FileNotFoundError, OverflowError):
        return True
