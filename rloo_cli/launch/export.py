"""A checkpoint made into a plain transformers folder, whatever strategy and number of processes wrote it; a CPU and little memory do."""

from __future__ import annotations

import json
import logging
import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli import __version__
from rloo_cli.data.adapter_folder import is_adapter
from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import DESCRIPTION, Checkpoint, find_checkpoint, list_steps, step_name
from rloo_cli.run.disk_errors import Advice, storage_errors
from rloo_cli.run.folder import RunFolder, open_existing
from rloo_cli.run.manifest import MANIFEST_NAME, DamagedError, Manifest
from rloo_cli.run.shards import SavedTensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rloo_cli.training.best import Best

logger = logging.getLogger(__name__)

CONFIG = "config.json"
ADVICE = Advice(again="export again", elsewhere="name another folder", another="Export that of another step")
"""Of `rloo export`, in errors of the disk and of checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    files: int
    """Of weights."""
    size: int
    """Of the weights, in bytes."""
    dtype: str
    """Of nearly all of them."""
    is_adapter: bool = False
    """Whether it is an adapter, for which the model is needed as well."""


def choose_checkpoint(name: str, step: int | None) -> tuple[Checkpoint, str]:
    """(a verified checkpoint, what to call it) that `rloo export NAME` means: a checkpoint, or a run's best, else its last.

    Raises:
        RefusedError: there is no such thing.
        StorageError: it is damaged.
    """
    path = Path(name)
    with storage_errors("look at", path):
        is_run = (path / "recipe.yaml").is_file()
    if is_run:
        return _of_run(open_existing(path), step)
    if not (path / MANIFEST_NAME).is_file():
        raise RefusedError(f"{name} is neither a run folder (it has no recipe.yaml) nor a checkpoint (it has no {MANIFEST_NAME}).")
    if step is not None:
        raise RefusedError(f"--step chooses among the checkpoints of a run, and {name} is no run folder.")
    if _kind(path) == "final":
        raise RefusedError(f"{name} is a final {_final_words(path).replace(' is', ', which is')}: copy it.")
    return _found(path.parent, path), f"checkpoint {name}"


def _of_run(folder: RunFolder, step: int | None) -> tuple[Checkpoint, str]:
    if step is not None:
        return _found(folder.checkpoints, step), f"step {step} of {folder.path}"
    if (best := _best(folder.checkpoints)) is not None:
        return _found(folder.checkpoints, best.step), f"step {best.step} of {folder.path}, its best by {best.metric} ({best.value:.4g})"
    found = find_checkpoint(folder.checkpoints)
    if found is None:
        final = f"; its final {_final_words(folder.final)}: {folder.final}." if folder.final.is_dir() else "."
        raise RefusedError(f"{folder.path} holds no checkpoint{final}")
    return found, f"step {found.step} of {folder.path}, its last"


def _final_words(path: Path) -> str:
    return (
        "adapter is as peft reads it already (--merge makes a model of it)"
        if is_adapter(path)
        else "model is a plain transformers folder already"
    )


def _found(folder: Path, which: int | Path) -> Checkpoint:
    found = find_checkpoint(folder, which)
    assert found is not None  # one that is asked for is there, or an error
    return found


def _kind(path: Path) -> Any:
    try:
        return Manifest.read(path).info.get("kind")
    except DamagedError as damage:
        raise StorageError(f"{damage.path}: {damage.reason}.") from damage


def _best(folder: Path) -> Best | None:
    """The run's best checkpoint, as the newest with a sound position has it."""
    from rloo_cli.training.best import best_of_document

    for step in reversed(list_steps(folder)):
        path = folder / step_name(step)
        try:
            Manifest.read(path).verify(path, ["position.json"])
            position = json.loads((path / "position.json").read_bytes())
            return best_of_document(position["best"])
        except (DamagedError, KeyError, OSError, ValueError, TypeError, RecursionError) as error:
            logger.warning("the position of %s cannot be used, and that of an older checkpoint says the best: %s", path, error)
    return None


def export(checkpoint: Checkpoint, target: Path, *, dtype: str | None = None) -> Exported:
    """Write a checkpoint's model to `target`, complete or not at all, a tensor at a time.

    Args:
        checkpoint: verified.
        target: a folder that is not there, or empty.
        dtype: to which floating-point tensors are rounded; None: as they were trained.

    Raises:
        RefusedError: something is at `target`.
        StorageError: it could not be read or written.
    """
    from rloo_cli.training.model_files import as_published, plan_weights, write_weights

    refuse_occupied(target)
    model, saved = skeleton(checkpoint), checkpoint.saved_tensors("model")
    plan = plan_weights(as_published(model, _shapes(saved, dtype)))
    atomic.make_folder(target.parent)
    atomic.ensure_free(target.parent, plan.size, f"model {target}")
    info = {"kind": "export", "step": checkpoint.step, "checkpoint": str(checkpoint.path), "rloo": __version__}
    with atomic.AtomicFolder(target, info=info, replace=True) as files:
        write_weights(files, plan, as_published(model, _tensors(saved, dtype)))
        names = str(plan.dtype).removeprefix("torch.")
        for name, content in description(checkpoint, dtype=names):
            atomic.make_folder((files.path / name).parent)
            files.write(name, content)
    return Exported(files=len(plan.files) + bool(plan.others), size=plan.size, dtype=names)


def refuse_occupied(target: Path) -> None:
    """Raise RefusedError where a folder is to go and something is, or where it would lie in what `rloo` has written as a whole."""
    with storage_errors("look at", target):
        is_empty = target.is_dir() and not any(target.iterdir())
        if not is_empty and (target.exists() or target.is_symlink()):
            raise RefusedError(f"{target} exists already{' and is not empty' if target.is_dir() else ''}: name a new folder.")
        place = Path(os.path.realpath(target))  # Path.resolve raises for links that go round in a circle
        for folder in (place, *place.parents):
            if (what := _whole_folder(folder)) is not None:
                raise RefusedError(f"{target} lies in {what}, {folder}: name a folder outside.")


def _whole_folder(path: Path) -> str | None:
    """What `path` is, where nothing else belongs into it."""
    if (path / "recipe.yaml").is_file() and RunFolder(path).checkpoints.is_dir():
        return "a run's folder"
    if not (path / MANIFEST_NAME).is_file():
        return None
    try:
        kind = Manifest.read(path).info.get("kind")
    except DamagedError:
        return None
    return {"checkpoint": "a checkpoint", "final": "a final model", "export": "an exported model"}.get(str(kind))


def skeleton(checkpoint: Checkpoint) -> PreTrainedModel | None:
    """The model without its weights, which knows how its kind is published; None for one with code of its own, which none is run of."""
    import torch
    from transformers import AutoConfig

    from rloo_cli.data.model_folder import check_files, model_errors, read_object, reason_of
    from rloo_cli.data.model_kind import model_class

    folder = checkpoint.path / DESCRIPTION
    check_files(folder, trust_remote_code=True)
    config = read_object(folder / CONFIG)
    if not config:
        raise StorageError(f"{checkpoint.path} has no {DESCRIPTION}/{CONFIG}, which says what kind of model it holds.")
    if config.get("auto_map"):
        return None
    try:
        found = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: PreTrainedModel = model_class(found).from_config(found)
    except model_errors() as error:
        raise StorageError(f"cannot make sense of {folder / CONFIG}: {reason_of(error)}") from error
    return model


def _shapes(saved: SavedTensors, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they will be, without data."""
    import torch

    for name in saved.names:
        yield name, rounded(torch.empty(saved.shape(name), dtype=saved.dtype(name), device="meta"), dtype)


def _tensors(saved: SavedTensors, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name in saved.names:
        yield name, rounded(saved.whole(name), dtype)


def rounded(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """The tensor in that floating-point type; None, or no such tensor: as it is."""
    import torch

    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor


def description(checkpoint: Checkpoint, *, dtype: str) -> Iterator[tuple[str, bytes]]:
    """What goes beside the weights, by name."""
    for name in checkpoint.names:
        if not name.startswith(f"{DESCRIPTION}/"):
            continue
        try:
            content = (checkpoint.path / name).read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {checkpoint.path / name}: {error.strerror}.") from error
        own = name.removeprefix(f"{DESCRIPTION}/")
        if own == CONFIG:
            content = (json.dumps({**json.loads(content), "dtype": dtype}, indent=2, sort_keys=True) + "\n").encode()
        yield own, content
