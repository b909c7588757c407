"""What an OSError becomes: one line that says what could not be done, where, why, how much room there is, and what to do."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the command under way tells its user to do next: by itself, that of `rloo train`."""

    again: str = "go on with --resume"
    """After the cause is gone."""
    elsewhere: str = "choose another --output-dir"
    another: str = "`--resume` alone takes the newest that is whole"
    """Where a checkpoint that was asked for is damaged."""


_TRAINING = Advice()
_ADVICE = ContextVar("advice", default=_TRAINING)


def advice() -> Advice:
    """That of the command under way."""
    return _ADVICE.get()


@contextlib.contextmanager
def advising(said: Advice) -> Iterator[None]:
    """Let errors of the block advise that."""
    token = _ADVICE.set(said)
    try:
        yield
    finally:
        _ADVICE.reset(token)


REMEDIES = {
    errno.ENOSPC: "Free some space, then {again}.",
    errno.EDQUOT: "Your quota is used up: free some space, then {again}.",
    errno.EFBIG: "The file system or a limit (`ulimit -f`) forbids a file of this size.",
    errno.EACCES: "Make the folder writable, or {elsewhere}.",
    errno.EPERM: "Make the folder writable, or {elsewhere}.",
    errno.EROFS: "The file system is read-only: {elsewhere}.",
    errno.ENOTDIR: "A file stands where a folder should be: move it away, or {elsewhere}.",
    errno.EEXIST: "Something stands there already: move it away, or {elsewhere}.",
    errno.EISDIR: "A folder stands where a file should be: move it away.",
    errno.ENOTEMPTY: "Something stands there already: move it away.",
    errno.EIO: "The disk reports an error: look at the system's log. What was saved before is untouched.",
}


@contextlib.contextmanager
def storage_errors(action: str, path: Path, *, need: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError, `cannot ACTION PATH: …`; `need` in bytes is told on a full disk."""
    try:
        yield
    except OSError as error:
        raise StorageError(_describe(error, action, path, need)) from error


def format_bytes(count: float) -> str:
    """Bytes as a person reads them, `1.5 GB`."""
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} TB"


def _describe(error: OSError, action: str, path: Path, need: int | None) -> str:
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        wanted = f"{format_bytes(need)} needed, " if need is not None else ""
        room = f" ({wanted}{_free_text(path)})"
    remedy = REMEDIES.get(error.errno or 0, "").format(again=advice().again, elsewhere=advice().elsewhere)
    return f"cannot {action} {path}: {error.strerror or error}{room}. {remedy}".rstrip()


def _free_text(path: Path) -> str:
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    return "free space unknown"
