"""Checkpoints: named tensors and JSON documents of one step, verified before they are used. saving.py writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.disk_errors import advice
from rloo_cli.run.manifest import MANIFEST_NAME, DamagedError, Manifest
from rloo_cli.run.ranks import ALONE, Ranks
from rloo_cli.run.shards import RANK_FILE, SavedState, SavedTensors, files_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT_FORMAT = 2
"""Raised when an older program could not read what a newer one writes. 1: the optimizer's state by the numbers of parameters."""

DESCRIPTION = "transformers"
"""A checkpoint's folder with what a transformers folder has beside the weights: configuration and tokenizer."""

STEP_NAME = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")
"""What `step_name` gives, and nothing that only looks like it."""

LIKE_A_STEP = re.compile(r"\d+")

SHOWN_CHARACTERS = 120
"""Of what Python says of a document that is not what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose sizes and hashes were found to be right."""

    step: int
    path: Path
    info: Mapping[str, Any]
    """What the manifest says of it: `step`, `format`, and as `rloo` the version that wrote it."""
    names: tuple[str, ...]
    """Its files, without the manifest."""

    def has(self, name: str) -> bool:
        """Whether it holds a document of that name, or tensors."""
        return f"{name}.json" in self.names or bool(files_of(name, self.names))

    def saved_tensors(self, name: str) -> SavedTensors:
        """The tensors saved under `name`, to be read one at a time or in part; StorageError where they cannot be."""
        try:
            return SavedTensors([self.path / file for file in files_of(name, self.names)])
        except DamagedError as damage:
            raise StorageError(f"cannot read {damage.path}: {damage.reason}") from damage

    def saved_state(self) -> SavedState:
        """Model and optimizer; StorageError where they cannot be read."""
        return SavedState(
            model=self.saved_tensors("model"), optimizer=self.saved_tensors("optimizer"), document=self.load_document("optimizer")
        )

    def load_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """All tensors saved under `name`, in memory; StorageError where they cannot be read."""
        saved = self.saved_tensors(name)
        return {each: saved.whole(each) for each in saved.names}

    def load_document(self, name: str) -> Any:
        """The document saved under `name`; StorageError where it cannot be read."""
        path = self.path / f"{name}.json"
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error

    @contextlib.contextmanager
    def understood(self, name: str) -> Iterator[None]:
        """Makes a StorageError of what the block stumbles over where the document `name` is not what this version writes."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0][:SHOWN_CHARACTERS]
            raise StorageError(
                f"checkpoint {self.path} cannot be used: {name}.json does not hold what this version of rloo writes ({said}). "
                f"{advice().another}."
            ) from error

    def origin(self) -> Mapping[str, Any]:
        """What its run began with: `base_model`, `data`, `completions_per_step`, `run`; early checkpoints have less, or only `model`."""
        document = self.load_document("origin") if self.has("origin") else {}
        return document if isinstance(document, dict) else {}


def find_checkpoint(folder: Path, which: Literal["latest"] | int | Path = "latest", ranks: Ranks = ALONE) -> Checkpoint | None:
    """The checkpoint to resume from, verified; None when none was ever saved.

    `latest`: the newest that verifies; each newer one that does not is named in a warning. A step or a path: that one or an error.
    A collective: each of the ranks verifies its share of the files, and all come to the same.

    Raises:
        RefusedError: the step or path asked for does not exist, or a newer version of rloo wrote it.
        StorageError: it is damaged, or all are: each with its reason. Nothing is deleted.
    """
    if which == "latest":
        return _find_latest(folder, ranks)
    path = which if isinstance(which, Path) else folder / step_name(which)
    ranks.together(lambda: refuse_absent(path, folder))
    try:
        return _open(path, ranks)
    except DamagedError as error:
        raise StorageError(f"checkpoint {path} cannot be used: {error}. {advice().another}.") from error


def list_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints below `folder`, rising, damaged ones included."""
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if STEP_NAME.fullmatch(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot list {folder}: {error.strerror}.") from error


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """The new paths of all checkpoints newer than `step` (0: all of them), renamed to NAME.aside-N; nothing is deleted.

    To be called when a run goes on from `step`: those belong to a future that will now be written again.
    """
    moved = [_set_aside(folder / step_name(newer)) for newer in list_steps(folder) if newer > step]
    if moved:
        logger.warning(
            "checkpoints newer than step %d, which this run goes on from, were set aside: %d, the first as %s", step, len(moved), moved[0]
        )
    return moved


def prune_checkpoints(folder: Path, limit: int | None, *, saved: int, best: int | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`, in which the `best` step counts; it stays, and so does the one just `saved`.

    Those up to `saved` that are complete count; whatever else lies there is left alone. A deletion that fails is a warning.
    """
    if limit is None:
        return
    steps = [step for step in list_steps(folder) if step <= saved and _is_complete(folder / step_name(step), step)]
    kept = {saved} | {best} & set(steps)
    for step in reversed(steps):
        if len(kept) < limit:
            kept.add(step)
    for step in steps:
        if step not in kept:
            _delete(folder / step_name(step))


def _is_complete(path: Path, step: int) -> bool:
    """Whether it is that step's checkpoint by its manifest; the files are not looked at."""
    try:
        info = Manifest.read(path).info
    except DamagedError:
        return False
    return info.get("kind") == "checkpoint" and info.get("step") == step


def step_name(step: int) -> str:
    """`000010` for step 10."""
    return f"{step:06d}"


def _warn_of_strays(folder: Path) -> None:
    """Say once which folders look like checkpoints and have no name that one gets."""
    strays = sorted(entry.name for entry in folder.iterdir() if LIKE_A_STEP.fullmatch(entry.name) and not STEP_NAME.fullmatch(entry.name))
    if strays:
        logger.warning("no checkpoint has such a name, so they are left alone: %s in %s", ", ".join(strays), folder)


def refuse_absent(path: Path, folder: Path) -> None:
    """Raise RefusedError where there is no checkpoint at `path`, with the steps that are saved below `folder`."""
    if not path.is_dir():
        there = ", ".join(str(step) for step in list_steps(folder)) or "none"
        raise RefusedError(f"there is no checkpoint {path}. Steps saved in {folder}: {there}.")


def _find_latest(folder: Path, ranks: Ranks) -> Checkpoint | None:
    steps = ranks.broadcast(ranks.together(lambda: list_steps(folder) if ranks.is_main else []))
    if ranks.is_main and folder.is_dir():
        _warn_of_strays(folder)
    bad: list[DamagedError] = []
    for step in reversed(steps):
        try:
            found = _open(folder / step_name(step), ranks)
        except DamagedError as error:
            bad.append(error)
            continue
        for damage in bad:
            logger.warning("checkpoint file %s: %s; going on from step %d instead", damage.path, damage.reason, found.step)
        return found
    if not bad:
        return None
    reasons = "".join(f"\n  {damage}" for damage in bad)
    raise StorageError(
        f"all {len(bad)} checkpoints in {folder} are damaged; nothing was deleted:{reasons}\nRestore one of them, or start anew elsewhere."
    )


def _open(path: Path, ranks: Ranks) -> Checkpoint:
    """The checkpoint, every byte of it verified by one of the ranks; DamagedError on all where one found damage."""
    manifest = _agreed(ranks, lambda: _manifest(path))
    version = manifest.info.get("format")
    if version != CHECKPOINT_FORMAT:
        raise RefusedError(
            f"checkpoint {path} has format {version}; this version of rloo reads format {CHECKPOINT_FORMAT}: use the version that wrote it."
        )
    _agreed(ranks, lambda: manifest.verify(path, manifest.share(ranks.rank, ranks.world_size)))
    _agreed(ranks, lambda: _refuse_incomplete(path, manifest.files) if ranks.is_main else None)
    return Checkpoint(step=manifest.info["step"], path=path, info=manifest.info, names=tuple(sorted(manifest.files)))


def _manifest(path: Path) -> Manifest:
    manifest = Manifest.read(path)
    if manifest.info.get("kind") != "checkpoint" or not isinstance(manifest.info.get("step"), int):
        raise DamagedError(path / MANIFEST_NAME, "not a checkpoint's manifest")
    return manifest


def _refuse_incomplete(path: Path, names: Iterable[str]) -> None:
    """Raise DamagedError where the files of several ranks do not make whole tensors."""
    for kind in {match[1] for name in names if (match := RANK_FILE.fullmatch(name))}:
        SavedTensors([path / name for name in files_of(kind, names)])


def _agreed(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns; where it finds damage on any rank, DamagedError on every one."""
    result, damage = None, None
    try:
        result = work()
    except DamagedError as error:
        damage = (error.path, error.reason)
    for found in ranks.gather(damage):
        if found is not None:
            raise DamagedError(*found)
    return result  # type: ignore[return-value]


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    atomic.rename(path, aside)
    return aside


def _delete(path: Path) -> None:
    """Delete a checkpoint under a temporary name, so that a kill in the middle leaves no damaged checkpoint."""
    doomed = atomic.temporary_path(path)
    try:
        atomic.rename(path, doomed)
        atomic.remove_tree(doomed)
    except StorageError as error:
        logger.warning("old checkpoint %s could not be deleted: %s Training goes on.", path, error.message)
