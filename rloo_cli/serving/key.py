"""The key that opens the server: from a file, from the environment, or made here. Never on a command line, never in a log."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.errors import RefusedError
from rloo_cli.run import atomic
from rloo_cli.serving.address import Address
from rloo_cli.serving.command import KEY_VARIABLE

SHORTEST, LONGEST = 16, 4096
"""Characters. A shorter key can be guessed; a longer file is something else."""
FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP
"""A group may read the file (that is how secrets are mounted into containers); others may not, and nobody else may write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key and where it came from."""

    value: str = field(repr=False)
    file: Path | None = None
    """None: the environment."""
    is_new: bool = False


def find_key(key_file: str | None, environment: Mapping[str, str], address: Address, *, create: bool = True) -> Key | None:
    """The key of `key_file`, else of RLOO_VLLM_KEY, else None; a file that does not exist is made, readable by this user alone.

    With `create=False` no file is made; the key is empty then.

    Raises:
        RefusedError: a key that is too short, or a file that others can read; no key, and an address that other machines reach.
    """
    if key_file is not None:
        path = Path(key_file).expanduser().absolute()
        return Key(value=read_key(path), file=path) if path.exists() else _new_key(path, create=create)
    if given := environment.get(KEY_VARIABLE):
        return Key(value=_checked(given, KEY_VARIABLE))
    if not address.is_loopback:
        raise RefusedError(
            f"--host {address.host} is reached from other machines, and whoever reaches the server owns the model: it needs a key. "
            f"--key-file FILE (made when missing), or the environment variable {KEY_VARIABLE}."
        )
    return None


def read_key(path: Path, *, option: str = "--key-file") -> str:
    """The key in a file, without the line's end; `option` is what named the file.

    Raises:
        RefusedError: unreadable, readable by others, or no key.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")[: LONGEST + 1] if stat.S_ISREG(mode) else None
    except (OSError, UnicodeError) as error:
        raise RefusedError(f"{option} {path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if text is None:
        raise RefusedError(f"{option} {path}: not a file.")
    if mode & FORBIDDEN_MODE:
        raise RefusedError(f"{option} {path}: others can read or change it (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}")
    return _checked(text.strip(), f"{option} {path}")


def _checked(key: str, where: str) -> str:
    if not SHORTEST <= len(key) <= LONGEST or not (key.isascii() and key.isprintable()) or " " in key:
        raise RefusedError(f"{where}: a key is one word of {SHORTEST} to {LONGEST} ASCII characters; --key-file of a new file makes one.")
    return key


def _new_key(path: Path, *, create: bool) -> Key:
    if not path.parent.is_dir():
        raise RefusedError(f"--key-file {path}: there is no folder {path.parent}.")
    if not create:
        return Key(value="", file=path, is_new=True)
    value = secrets.token_urlsafe(32)
    atomic.write_secret(path, value + "\n")
    return Key(value=value, file=path, is_new=True)
