"""The proof that all ranks see one run folder: without it each would write its part of a checkpoint where nobody finds it."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from pathlib import Path

from rloo_cli.errors import RefusedError, StorageError
from rloo_cli.run import atomic
from rloo_cli.run.ranks import Ranks

PROOF = "shared"
PATIENCE_SECONDS = 10.0
"""For a network file system to show on one host what was written on another."""
PAUSE_SECONDS = 0.1


def prove_one_folder(attempt: Path, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
    """Return when every rank has read, in an attempt's log folder, what the main rank has just written there; a collective.

    Raises:
        RefusedError: this rank's host has another folder of that name, or none.
        StorageError: the main rank cannot write there.
        NeighbourError: that is so on another rank.
    """
    if ranks.world_size == 1:
        return
    file, token = attempt / PROOF, ranks.broadcast(uuid.uuid4().hex)
    ranks.together(lambda: atomic.write_file(file, token) if ranks.is_main else None)
    try:
        ranks.together(lambda: _look_for(file, token, patience, ranks))
    finally:
        if ranks.is_main:
            with contextlib.suppress(StorageError):  # it has done its work
                atomic.remove_file(file)


def _look_for(file: Path, token: str, patience: float, ranks: Ranks) -> None:
    deadline = time.monotonic() + patience
    while _text(file) != token:
        if time.monotonic() > deadline:
            raise RefusedError(
                f"rank {ranks.first + ranks.rank} on {socket.gethostname()} does not see the run folder of rank 0: there is no {file} on "
                "that host, or another. The run folder (--output-dir) must be on a file system that all hosts share."
            )
        time.sleep(PAUSE_SECONDS)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
