"""What a complete folder says of itself: the size and sha256 of each file, and of the manifest too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
Bytes = bytes | memoryview


class DamagedError(Exception):
    """A file is not what the manifest says. Internal: it becomes a warning or a StorageError."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's size in bytes and its sha256 in hex."""

    size: int
    sha256: str


class Digest:
    """Size and sha256 of a stream."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._size = 0

    def update(self, data: Bytes) -> None:
        """Take in the next bytes."""
        view = memoryview(data)
        self._hash.update(view)
        self._size += view.nbytes

    def entry(self) -> FileEntry:
        """What was seen so far."""
        return FileEntry(size=self._size, sha256=self._hash.hexdigest())


def digest_file(path: Path) -> FileEntry:
    """Size and sha256 of a file as it is on disk."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    Example: `Manifest(info={"step": 10}, files={"model.safetensors": FileEntry(size=1024, sha256="ab…")})`
    """

    info: Mapping[str, Any]
    """What the writer says of the folder, such as its step."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every file below the folder but the manifest, by its path with `/`."""

    def to_bytes(self) -> bytes:
        """The one spelling of this manifest; the last line is the sha256 of all before it, so that no flipped bit passes."""
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        body = json.dumps({"format": MANIFEST_FORMAT, "info": dict(self.info), "files": files}, indent=1, allow_nan=False)
        return (body[:-2] + f',\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n').encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            DamagedError: it is missing, unreadable or not as it was written.
        """
        path = folder / MANIFEST_NAME
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from error
        try:
            document = json.loads(data)
            files = {name: FileEntry(**entry) for name, entry in document["files"].items()}
            manifest = cls(info=dict(document["info"]), files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(path, "not a manifest (cut off or damaged)") from error
        if any(name.startswith("/") or ".." in name.split("/") for name in files):
            raise DamagedError(path, "it names files outside its folder")
        if manifest.to_bytes() != data:
            raise DamagedError(path, "damaged: it does not match its own sha256")
        return manifest

    def verify(self, folder: Path, names: Iterable[str] | None = None, *, contents: bool = True) -> None:
        """Compare the sizes, and with `contents` the sha256, of all files, or of those named.

        Raises:
            DamagedError: names the first file that is missing, cut off, damaged or unreadable.
        """
        for name in self.files if names is None else names:
            _verify_file(folder / name, self.files[name], contents=contents)

    def share(self, rank: int, world_size: int) -> list[str]:
        """The files that one of several ranks verifies: about as many bytes for each."""
        loads, shares = [0] * world_size, [list[str]() for _ in range(world_size)]
        for name, entry in sorted(self.files.items(), key=lambda item: (-item[1].size, item[0])):
            least = loads.index(min(loads))
            loads[least] += entry.size
            shares[least].append(name)
        return shares[rank]


def _verify_file(path: Path, entry: FileEntry, *, contents: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise DamagedError(path, f"{size} bytes instead of {entry.size}")
        if contents and digest_file(path) != entry:
            raise DamagedError(path, "damaged: its sha256 is not the manifest's")
    except FileNotFoundError as error:
        raise DamagedError(path, "missing") from error
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from error
