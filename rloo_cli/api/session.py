"""The process that a training is started in: which program it is, what it must find again afterwards, and how errors speak to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rloo_cli.errors import InterruptedTwiceError, RefusedError, RlooError, StoppedError
from rloo_cli.launch.given import Place, place_of

IN_PYTHON: Mapping[str, str] = {
    "--resume=auto": "train(resume_from_checkpoint=True)",
    "--resume=STEP": "train(resume_from_checkpoint=STEP)",
    "--resume": "train(resume_from_checkpoint=True)",
    "--output-dir": "output_dir",
    "--trust-remote-code": "trust_remote_code=True",
    "--code-dir": "the program's folder",
    "--set": "RLOOConfig's",
}
"""Options of the command line that errors name → what says the same here."""
_OPTION = re.compile("|".join(re.escape(option) for option in sorted(IN_PYTHON, key=len, reverse=True)))
_training = threading.Lock()
_turns = itertools.count()
"""Numbers the trainings of this process; a launcher's processes all come here in the same order."""


def program() -> tuple[Path, str]:
    """(the folder of the program that runs, its name): of a notebook or a prompt, the working folder."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return (Path(file).resolve().parent, Path(file).stem) if file else (Path.cwd(), "notebook")


def next_place() -> Place | None:
    """Where a launcher put this process for the training that begins now; None where it is alone."""
    place, turn = place_of(os.environ), next(_turns)
    return None if place is None else replace(place, turn=turn)


def leave_of_program() -> Callable[[], None] | None:
    """What a second Ctrl-C may do where nothing else helps: end a program, but not the session of a notebook."""
    return None if hasattr(sys.modules["__main__"], "__file__") else lambda: None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds the process for one training: devices, precision and environment variables are the whole process's.

    Raises:
        RefusedError: another is under way, in a thread or around this one.
    """
    if not _training.acquire(blocking=False):
        raise RefusedError("another training is under way in this process: wait until it has ended, or start a process for each.")
    try:
        yield
    finally:
        _training.release()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Puts environment variables back after the block: a training takes those that accelerate would act on."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def outside_of_loops() -> Iterator[None]:
    """Lets the block run event loops of its own where this thread is inside of one, as the cells of a notebook are; that one waits anyway."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None:
            asyncio.set_event_loop(loop)


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Has errors name what is said in Python where they name options of the command line."""
    try:
        yield
    except RlooError as error:
        message = _OPTION.sub(lambda option: IN_PYTHON[option[0]], error.message)
        if isinstance(error, StoppedError | InterruptedTwiceError) and "resume_from_checkpoint" not in message:
            message += " To go on: train(resume_from_checkpoint=True)."
        error.message, error.args = message, (message,)
        raise
