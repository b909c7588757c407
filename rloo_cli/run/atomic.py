"""Durable files: the one place that writes them. Whole or absent, whatever kills the process.

A file or folder is written under a temporary name (`.tmp-<name>-<pid>`), fsynced, renamed, and the parent folder
fsynced. Every call to the operating system goes through `fs`, so that a test can make the n-th one fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rloo_cli.errors import StorageError
from rloo_cli.run.disk_errors import advice, format_bytes, storage_errors
from rloo_cli.run.manifest import MANIFEST_NAME, Bytes, Digest, FileEntry, Manifest, digest_file

logger = logging.getLogger(__name__)

WRITE_CHUNK = 16 << 20
"""Bytes of one write call: large enough to cost nothing, small enough for a signal to be noticed in between."""


OF_SYSTEM = re.compile(r"\(os error (\d+)\)$")
"""How a library written in Rust ends what it says of an error of the operating system's."""


class FileSystem:
    """The operating system's calls that change something, and the one that tells the room left."""

    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    truncate = staticmethod(os.ftruncate)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    mkdir = staticmethod(os.mkdir)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)
    chmod = staticmethod(os.chmod)

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; new files get the mode that the umask asks for."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write where `path` lies."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


fs = FileSystem()


def write_file(path: Path, data: bytes | str) -> None:
    """Write a whole file, durably, in place of what was there.

    Raises:
        StorageError: it could not be written; what was there before still stands.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = temporary_path(path)
    with storage_errors("write", path, need=len(content)):
        with _on_failure(_remove_quietly, temporary):
            _write_new(temporary, [content])
            fs.rename(temporary, path)
        fsync_folder(path.parent)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as a whole file, durably; NaN and infinities are refused with ValueError."""
    write_file(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_secret(path: Path, text: str) -> None:
    """Write a new file that this user alone can read, durably.

    Raises:
        StorageError: it could not be written, or something stands there already.
    """
    with storage_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with _on_failure(_remove_quietly, path):
                _write_all(descriptor, text.encode())
                fs.fsync(descriptor)
        finally:
            fs.close(descriptor)
        fsync_folder(path.parent)


def append_line(path: Path, line: str) -> int:
    """Append one line with one write; the file's new size in bytes comes back. Nothing is fsynced (see `sync_file`).

    Raises:
        StorageError: it could not be written; the file is cut back to the lines that it had.
    """
    data = (line + "\n").encode()
    with storage_errors("append to", path, need=len(data)), _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as descriptor:
        size = os.fstat(descriptor).st_size
        with _on_failure(_truncate_quietly, descriptor, size):
            _write_all(descriptor, data)
        return size + len(data)


def truncate_file(path: Path, size: int) -> None:
    """Cut a file back to `size` bytes, durably; it is created when missing."""
    with storage_errors("cut back", path), _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        fs.truncate(descriptor, size)
        fs.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Make what was appended to a file survive a loss of power."""
    with storage_errors("write", path), _opened(path, os.O_WRONLY) as descriptor:
        fs.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably.

    Raises:
        StorageError: a file stands there, or the parent is not writable.
    """
    with storage_errors("create the folder", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                fs.mkdir(folder)
            fsync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, durably."""
    with storage_errors("rename", source):
        fs.rename(source, target)
        fsync_folder(target.parent)


def remove_file(path: Path) -> None:
    """Remove a file; fine when it is gone already."""
    with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
        fs.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it; a link is removed, not followed.

    Raises:
        StorageError: something could not be removed.
    """
    with storage_errors("remove", path):
        _remove(path)


def remove_if_empty(path: Path) -> None:
    """Remove a folder that holds nothing; any other, and one that cannot be removed, is left as it is."""
    with contextlib.suppress(OSError):
        fs.rmdir(path)


def ensure_free(folder: Path, need: int, what: str) -> None:
    """Check that `need` bytes are free where `folder` lies, before a byte of `what` is written.

    Raises:
        StorageError: there is less, with both numbers.
    """
    with storage_errors("look for free space in", folder):
        free = fs.free_bytes(folder)
    if free < need:
        raise StorageError(
            f"{what}: no room: {format_bytes(need)} needed, {format_bytes(free)} free. Free some space, then {advice().again}."
        )


def temporary_path(path: Path) -> Path:
    """The name under which this process prepares `path`, in the same folder."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}")


class AtomicFolder:
    """A folder that appears complete, with a manifest of sizes and sha256, or not at all.

    Files may also be put below `path` by other code (a tokenizer's save_pretrained); leaving the block adds them to the manifest,
    gives them the mode that the umask asks for, and fsyncs them. An exception in the block removes everything.

    Example: `with AtomicFolder(run / "checkpoints" / "000010", info={"step": 10}) as folder: folder.write_json("trainer.json", {...})`
    """

    def __init__(self, target: Path, *, info: Mapping[str, Any] | None = None, replace: bool = False) -> None:
        self.target = target
        self.path = temporary_path(target)
        self._info = dict(info or {})
        self._replace = replace
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> AtomicFolder:
        self._refuse_existing()
        make_folder(self.target.parent)
        with storage_errors("create the folder", self.target):
            if self.path.exists():
                _remove(self.path)
            fs.mkdir(self.path)
        return self

    def write(self, name: str, data: str | bytes | Iterable[Bytes], *, size: int | None = None) -> None:
        """Write one file of the folder, from a stream of chunks too; it is hashed while it is written.

        `size` (bytes, where the caller knows it) serves the message on a full disk.
        """
        chunks: Iterable[Bytes] = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
        need = size if size is not None else len(data) if isinstance(data, str | bytes) else None
        self._files[name] = write_part(self.path, self.target, name, chunks, size=need)

    def take_in(self, files: Mapping[str, FileEntry]) -> None:
        """Take in what other processes wrote below `path` by `write_part`.

        Raises:
            StorageError: this process does not see it.
        """
        for name, entry in files.items():
            with storage_errors("find", self.target / name):
                seen = (self.path / name).stat().st_size
            if seen != entry.size:
                raise StorageError(
                    f"{self.target / name} was written with {entry.size} bytes, and has {seen} here: the disk is not shared."
                )
            self._files[name] = entry

    def write_json(self, name: str, document: Any) -> None:
        """Write a JSON document; NaN and infinities are refused with ValueError."""
        self.write(name, json.dumps(document, allow_nan=False))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _remove_quietly(self.path)
            self._explain(error)
            return
        with _on_failure(_remove_quietly, self.path):
            self._commit()

    def _explain(self, error: BaseException) -> None:
        """Raise a StorageError for what other code could not write below the folder."""
        if isinstance(error, OSError):
            with storage_errors("write", self.target):
                raise error
        if type(error).__module__.startswith("safetensors"):  # its errors are no OSErrors: "I/O error: No space left on device"
            raise StorageError(f"cannot write {self.target}: {error}") from error
        if type(error) is Exception and (match := OF_SYSTEM.search(str(error))):  # so says tokenizers
            with storage_errors("write", self.target):
                raise OSError(int(match[1]), os.strerror(int(match[1]))) from error

    def _commit(self) -> None:
        with storage_errors("write", self.target):
            self._adopt()
            manifest = Manifest(info=self._info, files=self._files)
            _write_new(self.path / MANIFEST_NAME, [manifest.to_bytes()])
            fsync_folder(self.path)
            if self._replace:
                self._move_old_away()
            self._refuse_existing()
            fs.rename(self.path, self.target)
            fsync_folder(self.target.parent)

    def _adopt(self) -> None:
        """Take in what other code has written below the folder."""
        mode = self.path.stat().st_mode & 0o666
        for file in sorted(self.path.rglob("*")):
            name = file.relative_to(self.path).as_posix()
            if file.is_dir():
                fsync_folder(file)
            elif name not in self._files:
                fs.chmod(file, mode)
                with _opened(file, os.O_RDONLY) as descriptor:
                    fs.fsync(descriptor)
                self._files[name] = digest_file(file)

    def _move_old_away(self) -> None:
        if self.target.exists():
            old = self.target.with_name(f".tmp-{self.target.name}.old-{os.getpid()}")
            fs.rename(self.target, old)
            _remove_quietly(old)

    def _refuse_existing(self) -> None:
        if not self._replace and os.path.lexists(self.target):
            raise StorageError(f"{self.target} exists already and is never overwritten; move it away, then {advice().again}.")


def write_part(folder: Path, target: Path, name: str, chunks: Iterable[Bytes], *, size: int | None = None) -> FileEntry:
    """Write one file of a folder that will be `target`, which messages name, durably; its size and sha256 come back.

    For a process that does not put the folder in its place: that one's `AtomicFolder.take_in` is told of the file.
    """
    with storage_errors("write", target / name, need=size):
        return _write_new(folder / name, chunks)


def sync_folder(path: Path, target: Path) -> None:
    """Make the names in a folder that will be `target`, which messages name, survive a loss of power.

    Raises:
        StorageError: the disk reports an error.
    """
    with storage_errors("write", target):
        fsync_folder(path)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power; file systems that cannot are left alone."""
    with _opened(path, os.O_RDONLY) as descriptor:
        try:
            fs.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


@contextlib.contextmanager
def _on_failure(undo: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Call `undo` when the block is left by any exception, a signal's included."""
    with contextlib.ExitStack() as stack:
        stack.callback(undo, *arguments)
        yield
        stack.pop_all()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = fs.open(path, flags)
    try:
        yield descriptor
    finally:
        fs.close(descriptor)


def _write_new(path: Path, chunks: Iterable[Bytes]) -> FileEntry:
    """Write and fsync a file that nobody looks at yet; its size and sha256 come back."""
    digest = Digest()
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), WRITE_CHUNK):
                part = view[start : start + WRITE_CHUNK]
                _write_all(descriptor, part)
                digest.update(part)
        fs.fsync(descriptor)
    return digest.entry()


def _write_all(descriptor: int, data: Bytes) -> None:
    """Write every byte: a short write is gone on with, and the error that cut it short comes from the next call."""
    view = memoryview(data).cast("B")
    while view:
        written = fs.write(descriptor, view)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        view = view[written:]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            _remove(child)
        fs.rmdir(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)


def _truncate_quietly(descriptor: int, size: int) -> None:
    with contextlib.suppress(OSError):
        fs.truncate(descriptor, size)


def _remove_quietly(path: Path) -> None:
    """Remove a temporary; what cannot be removed now goes at the next start."""
    try:
        _remove(path)
    except OSError as error:
        logger.warning("could not remove %s (%s); the next start removes it", path, error.strerror)
