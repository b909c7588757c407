"""A start that goes wrong before training leaves nothing of its own, and takes nothing that was there before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.errors import DataError, RecipeError, RefusedError
from rloo_cli.launch.target import Target
from rloo_cli.run import atomic

WRONG_BEFORE_TRAINING = (RecipeError, RefusedError, DataError, KeyboardInterrupt)


@contextlib.contextmanager
def folder_undone(target: Target) -> Iterator[None]:
    """Removes a new run's folder again where the block finds recipe, data or model wrong, if it was made there and is empty by then.

    It goes around the folder's lock, whose file is gone by then.
    """
    is_made_here = target.resume is None and not target.folder.path.exists()
    try:
        yield
    except WRONG_BEFORE_TRAINING:
        if is_made_here:
            atomic.remove_if_empty(target.folder.path)
        raise


@contextlib.contextmanager
def attempt_undone(target: Target) -> Iterator[Path]:
    """The log folder of a new attempt; what the attempt wrote goes again where the block finds recipe, data or model wrong.

    What stood in the folder before stays, and so does all of an attempt that came to a step. Of one that was to go on with a run and was
    refused, the logs alone go: it is no attempt that failed.
    """
    folder = target.folder
    goes_on = target.resume is not None or folder.has_begun()
    recorded = _stamp(folder.metrics)
    files = (folder.recipe, folder.recipe_source, folder.environment, folder.identity, folder.trackers)
    written = [file for file in files if not file.exists()]
    made = [place for place in (folder.rollouts, folder.checkpoints, folder.tensorboard, folder.logs) if not place.exists()]
    attempt = folder.new_attempt()
    try:
        yield attempt
    except WRONG_BEFORE_TRAINING as error:
        if not goes_on and not folder.metrics.exists():
            _undo(attempt, written, made)
        elif goes_on and not isinstance(error, KeyboardInterrupt) and _stamp(folder.metrics) == recorded:
            atomic.remove_tree(attempt)
        raise


def _stamp(file: Path) -> tuple[int, int] | None:
    """Size and time of the last change; None where there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        found = file.stat()
        return found.st_size, found.st_mtime_ns
    return None


def _undo(attempt: Path, written: list[Path], made: list[Path]) -> None:
    atomic.remove_tree(attempt)
    for file in written:
        if not file.is_dir():
            atomic.remove_file(file)
    for place in made:
        atomic.remove_if_empty(place)
