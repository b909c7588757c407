"""Checkpoints: named tensors and JSON documents of one step, complete or absent, verified before they are used."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rloo_cli import __version__
from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.manifest import MANIFEST_NAME, DamagedError, Manifest
from rloo_cli.run.tensors import load_safetensors, safetensors_stream

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHECKPOINT_FORMAT = 1
"""Raised when an older program could not read what a newer one writes."""

SPARE_BYTES = 1 << 20
"""Room asked for beyond the files themselves: manifest, folders, rounding up to blocks."""

STEP_NAME = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")
"""What `step_name` gives, and nothing that only looks like it."""

LIKE_A_STEP = re.compile(r"\d+")


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
        """Whether it holds tensors or a document of that name."""
        return f"{name}.safetensors" in self.names or f"{name}.json" in self.names

    def load_tensors(self, name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors saved under `name`; StorageError where they cannot be read."""
        return load_safetensors(self.path / f"{name}.safetensors", device)

    def load_document(self, name: str) -> Any:
        """The document saved under `name`; StorageError where it cannot be read."""
        path = self.path / f"{name}.json"
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error

    def origin(self) -> Mapping[str, Any]:
        """What its run began with: `base_model`, `data`, `completions_per_step`, `run`; early checkpoints have less, or only `model`."""
        document = self.load_document("origin") if self.has("origin") else {}
        return document if isinstance(document, dict) else {}


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    documents: Mapping[str, Any],
    limit: int | None = None,
    best: int | None = None,
) -> Path:
    """The path of the checkpoint just saved below `folder` (`folder/000010`), complete and on disk.

    Each entry of `tensors` becomes NAME.safetensors, each of `documents` NAME.json (tuples come back as lists). Then the oldest are
    deleted down to `limit`, see `prune_checkpoints`.

    Raises:
        StorageError: there is no room, a write failed, or the step is there already; older checkpoints are untouched.
    """
    target = folder / step_name(step)
    streams = {f"{name}.safetensors": safetensors_stream(named) for name, named in tensors.items()}
    texts = {f"{name}.json": json.dumps(document, allow_nan=False).encode() for name, document in documents.items()}
    need = sum(size for size, _ in streams.values()) + sum(len(text) for text in texts.values()) + SPARE_BYTES
    atomic.make_folder(folder)
    atomic.ensure_free(folder, need, f"checkpoint {target}")
    info = {"kind": "checkpoint", "format": CHECKPOINT_FORMAT, "step": step, "rloo": __version__}
    with atomic.AtomicFolder(target, info=info) as files:
        for name, (size, stream) in streams.items():
            files.write(name, stream, size=size)
        for name, text in texts.items():
            files.write(name, text)
    prune_checkpoints(folder, limit, saved=step, best=best)
    return target


def find_checkpoint(folder: Path, which: Literal["latest"] | int | Path = "latest") -> Checkpoint | None:
    """The checkpoint to resume from, verified; None when none was ever saved.

    `latest`: the newest that verifies; each newer one that does not is named in a warning. A step or a path: that one or an error.

    Raises:
        RefusedError: the step or path asked for does not exist, or a newer version of rloo wrote it.
        StorageError: it is damaged, or all are: each with its reason. Nothing is deleted.
    """
    if which == "latest":
        return _find_latest(folder)
    path = which if isinstance(which, Path) else folder / step_name(which)
    if not path.is_dir():
        there = ", ".join(str(step) for step in list_steps(folder)) or "none"
        raise RefusedError(f"there is no checkpoint {path}. Steps saved in {folder}: {there}.")
    try:
        return _open(path)
    except DamagedError as error:
        raise StorageError(f"checkpoint {path} cannot be used: {error}. `--resume` alone takes the newest that is whole.") from error


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


def _find_latest(folder: Path) -> Checkpoint | None:
    steps = list_steps(folder)
    if folder.is_dir():
        _warn_of_strays(folder)
    bad: list[DamagedError] = []
    for step in reversed(steps):
        try:
            found = _open(folder / step_name(step))
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


def _open(path: Path) -> Checkpoint:
    manifest = Manifest.read(path)
    step, version = manifest.info.get("step"), manifest.info.get("format")
    if manifest.info.get("kind") != "checkpoint" or not isinstance(step, int):
        raise DamagedError(path / MANIFEST_NAME, "not a checkpoint's manifest")
    if version != CHECKPOINT_FORMAT:
        raise RefusedError(
            f"checkpoint {path} has format {version}; this version of rloo reads format {CHECKPOINT_FORMAT}: use the version that wrote it."
        )
    manifest.verify(path)
    return Checkpoint(step=step, path=path, info=manifest.info, names=tuple(sorted(manifest.files)))


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
