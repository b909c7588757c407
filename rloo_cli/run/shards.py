"""Tensors that lie over the ranks: what each rank has of a run's state, and what a checkpoint gives back to whichever ranks resume.

Every strategy's part of a tensor is a contiguous range of the tensor flattened in row-major order (rows of FSDP2, flat partitions and
fragments of ZeRO, whole tensors where all is replicated), so that one format serves them all, and any number of processes under any
strategy reads what any other wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.run.manifest import DamagedError
from rloo_cli.run.tensors import Place, TensorsFile, safetensors_stream

if TYPE_CHECKING:
    import torch

SHARDS_KEY = "shards"
"""Where the metadata of a rank's file says what its tensors are parts of: `{name: {"start": 0, "shape": [3, 4]}}` as JSON."""

RANK_FILE = re.compile(r"(.+)-\d{5,}-of-\d{5,}\.safetensors")
"""What `rank_file` gives; the name in it is the first group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's contiguous part of a tensor, flattened in row-major order."""

    values: torch.Tensor
    """1-D, on any device; empty where the rank has none of it."""
    start: int
    """Where it begins in the flattened tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.values.numel() == math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """What one rank has of model and optimizer. Where all is replicated the main rank has whole tensors, and the others nothing."""

    model: Mapping[str, Shard]
    """By the model's own state-dict names; tied tensors once, under the first name."""
    optimizer: Mapping[str, Shard]
    """By `<entry>/<parameter name>`, such as `exp_avg/model.layers.0.mlp.up_proj.weight`."""
    document: Mapping[str, Any]
    """JSON: step counts and other scalars by `<entry>/<parameter name>`, hyperparameters, schedule. The main rank's is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Model and optimizer as a checkpoint has them."""

    model: SavedTensors
    optimizer: SavedTensors
    document: Mapping[str, Any]
    """As LocalState has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What one file has of a tensor."""

    start: int
    """In the flattened tensor, in elements; `stop` likewise."""
    stop: int
    file: TensorsFile
    place: Place


@dataclass(slots=True)
class _Saved:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    """The first file that has some of it."""
    pieces: list[_Piece] = field(default_factory=list)


class SavedTensors:
    """The tensors of a checkpoint, in whole files or in one for each rank that wrote; any range of them is read without the rest.

    Raises:
        DamagedError: a file is none of the format, the files contradict each other, or a part of a tensor is in none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._saved: dict[str, _Saved] = {}
        for path in paths:
            self._take_in(TensorsFile(path))
        for name, saved in self._saved.items():
            saved.pieces.sort(key=lambda piece: (piece.start, piece.stop))
            _refuse_gaps_and_contradictions(name, saved)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors, in the order of the files."""
        return tuple(self._saved)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._saved[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """As it was saved."""
        return self._saved[name].dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The elements from `start` up to `stop` (None: the last) of the flattened tensor; 1-D, on the CPU.

        Raises:
            StorageError: the file cannot be read.
        """
        import torch

        saved = self._saved[name]
        stop = math.prod(saved.shape) if stop is None else stop
        result = torch.empty(stop - start, dtype=saved.dtype)
        for piece in saved.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                piece.file.read_into(result[first - start : last - start], piece.place, first - piece.start)
        return result

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, in its shape."""
        return self.read(name).view(self.shape(name))

    def _take_in(self, file: TensorsFile) -> None:
        for name, (start, shape) in _parts(file).items():
            place = file.places[name]
            saved = self._saved.setdefault(name, _Saved(shape=shape, dtype=place.dtype, path=file.path))
            if (saved.shape, saved.dtype) != (shape, place.dtype):
                raise DamagedError(file.path, f"{name} has another shape or type than in {saved.path.name}")
            piece = _Piece(start=start, stop=start + math.prod(place.shape), file=file, place=place)
            if start < 0 or min(shape, default=0) < 0 or piece.stop > math.prod(shape):
                raise DamagedError(file.path, f"{name} has elements {start} to {piece.stop}, of {math.prod(shape)}")
            saved.pieces.append(piece)


def shards_stream(shards: Mapping[str, Shard]) -> tuple[int, Iterator[bytes | memoryview]]:
    """(size in bytes, the bytes) of a rank's file; where all shards are whole, of a plain one with the tensors in their shapes."""
    if all(shard.is_whole for shard in shards.values()):
        return safetensors_stream({name: shard.values.view(shard.shape) for name, shard in shards.items()})
    parts = {name: {"start": shard.start, "shape": shard.shape} for name, shard in shards.items()}
    return safetensors_stream({name: shard.values for name, shard in shards.items()}, {SHARDS_KEY: json.dumps(parts)})


def rank_file(name: str, rank: int, world_size: int) -> str:
    """`model-00002-of-00004.safetensors`: the second of four ranks' part of `model`."""
    return f"{name}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def files_of(name: str, files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that hold the tensors of that name, the whole one or the ranks' in order."""
    parts = {file for file in files if (match := RANK_FILE.fullmatch(file)) and match[1] == name}
    return sorted(parts | {f"{name}.safetensors"} & set(files))


def _parts(file: TensorsFile) -> dict[str, tuple[int, tuple[int, ...]]]:
    """(start, shape of the whole tensor) of each tensor in a file."""
    if SHARDS_KEY not in file.metadata:
        return {name: (0, place.shape) for name, place in file.places.items()}
    try:
        parts = json.loads(file.metadata[SHARDS_KEY])
        return {name: (int(parts[name]["start"]), tuple(int(size) for size in parts[name]["shape"])) for name in file.places}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(file.path, "it does not say what its tensors are parts of") from error


def _refuse_gaps_and_contradictions(name: str, saved: _Saved) -> None:
    """Raise DamagedError where a part of a tensor is in no file, or not the same in two; the pieces are in order."""
    reached, before = 0, None
    for piece in saved.pieces:
        if piece.start > reached:
            break
        if before is not None and piece.start < reached:
            _refuse_contradiction(name, piece, before)
        if piece.stop >= reached:
            reached, before = piece.stop, piece
    if reached < math.prod(saved.shape):
        raise DamagedError(saved.path, f"{name}: elements from {reached} on, of {math.prod(saved.shape)}, are in no file")


def _refuse_contradiction(name: str, one: _Piece, other: _Piece) -> None:
    """Raise DamagedError where two pieces that overlap have different bytes there."""
    import torch

    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    values = [torch.empty(stop - start, dtype=piece.place.dtype) for piece in (one, other)]
    for piece, target in zip((one, other), values, strict=True):
        piece.file.read_into(target, piece.place, start - piece.start)
    if not torch.equal(*(value.view(torch.uint8) for value in values)):
        raise DamagedError(one.file.path, f"{name}: elements {start} to {stop} are others than in {other.file.path.name}")
