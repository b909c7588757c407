"""Checkpoints written: complete or absent, whatever kills or fails any of the ranks that write them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli import __version__
from rloo_cli.run import atomic
from rloo_cli.run.checkpoint import CHECKPOINT_FORMAT, prune_checkpoints, step_name
from rloo_cli.run.manifest import Bytes, FileEntry
from rloo_cli.run.ranks import ALONE, Ranks
from rloo_cli.run.shards import Shard, rank_file, shards_stream
from rloo_cli.run.tensors import safetensors_stream

if TYPE_CHECKING:
    import torch

SPARE_BYTES = 1 << 20
"""Room asked for beyond the files themselves: manifest, folders, rounding up to blocks."""

Streams = dict[str, tuple[int, Iterator[Bytes]]]
"""By a file's name: its size in bytes, and its content."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    documents: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    shards: Mapping[str, Mapping[str, Shard]] | None = None,
    further: Callable[[Path], None] | None = None,
    ranks: Ranks = ALONE,
    limit: int | None = None,
    best: int | None = None,
) -> Path:
    """The path of the checkpoint just saved below `folder` (`folder/000010`), complete and on disk.

    A collective. Each rank writes and hashes its own files; the main one makes the folder, puts the manifest in and the folder in its
    place when all have, and then deletes the oldest checkpoints down to `limit`, see `prune_checkpoints`.

    Args:
        folder: of all checkpoints.
        step: after which the state is what is saved.
        documents: NAME.json each, the main rank's (tuples come back as lists).
        tensors: NAME.safetensors each, the main rank's.
        shards: every rank's, of the same names: one NAME.safetensors where the main rank has whole tensors and nobody else any, else a
            file of each rank that has some.
        further: puts more files below the path that it is given, on the main rank.
        ranks: those that save together.
        limit: of the number of checkpoints that stay; None: all do.
        best: the step whose checkpoint stays in any case.

    Raises:
        StorageError: there is no room, a write failed, or the step is there already; older checkpoints are untouched.
        NeighbourError: that happened on another rank.
    """
    target = folder / step_name(step)
    streams = _streams_of_shards(shards or {}, ranks)
    if ranks.is_main:
        streams |= {f"{name}.safetensors": safetensors_stream(named) for name, named in tensors.items()}
        streams |= {f"{name}.json": _text(document) for name, document in documents.items()}
    need = sum(ranks.gather(sum(size for size, _ in streams.values()))) + SPARE_BYTES
    with contextlib.ExitStack() as stack:
        files = ranks.together(lambda: _begin(stack, target, need, step) if ranks.is_main else None)
        path = ranks.broadcast(files.path if files is not None else None)
        assert path is not None
        told = ranks.gather(ranks.together(lambda: _write(path, target, streams, ranks)))
        ranks.together(lambda: _complete(stack, files, told, further) if files is not None else None)
    if ranks.is_main:
        prune_checkpoints(folder, limit, saved=step, best=best)
    return target


def _text(document: Any) -> tuple[int, Iterator[Bytes]]:
    text = json.dumps(document, allow_nan=False).encode()
    return len(text), iter([text])


def _streams_of_shards(shards: Mapping[str, Mapping[str, Shard]], ranks: Ranks) -> Streams:
    """This rank's files of what lies over the ranks."""
    streams: Streams = {}
    for name, named in shards.items():
        are_whole = all(shard.is_whole for shard in named.values())
        have_some = ranks.gather((bool(named), are_whole))
        is_one_file = have_some[0][1] and not any(some for some, _ in have_some[1:])
        if is_one_file and ranks.is_main:
            streams[f"{name}.safetensors"] = shards_stream(named)
        elif named and not is_one_file:
            streams[rank_file(name, ranks.rank, ranks.world_size)] = shards_stream(named)
    return streams


def _begin(stack: contextlib.ExitStack, target: Path, need: int, step: int) -> atomic.AtomicFolder:
    """The folder to be, under its temporary name; leaving the stack by an error removes it."""
    atomic.make_folder(target.parent)
    atomic.ensure_free(target.parent, need, f"checkpoint {target}")
    info = {"kind": "checkpoint", "format": CHECKPOINT_FORMAT, "step": step, "rloo": __version__}
    return stack.enter_context(atomic.AtomicFolder(target, info=info))


def _write(path: Path, target: Path, streams: Streams, ranks: Ranks) -> dict[str, FileEntry]:
    """Write this rank's files, durably; their sizes and hashes come back."""
    written = {name: atomic.write_part(path, target, name, stream, size=size) for name, (size, stream) in streams.items()}
    if written and not ranks.is_main:
        atomic.sync_folder(path, target)
    return written


def _complete(
    stack: contextlib.ExitStack, files: atomic.AtomicFolder, told: list[dict[str, FileEntry]], further: Callable[[Path], None] | None
) -> None:
    """Take in what all ranks wrote, and put the folder in its place."""
    with stack.pop_all():
        for written in told:
            files.take_in(written)
        if further is not None:
            further(files.path)
