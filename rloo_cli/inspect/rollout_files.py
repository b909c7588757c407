"""The rollout files of a run, and which of them a word on the command line means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rloo_cli.errors import RefusedError
from rloo_cli.run.folder import RunFolder

NAME = re.compile(r"(?:(eval|step)-)?(\d+)\.parquet")
ONE_STEP = re.compile(r"(?:(train|eval|failed)-)?(\d+)")
RANGE = re.compile(r"(\d+)-(\d+)")
MOST_NAMED = 6
"""Steps that a message lists."""


class RolloutKind(StrEnum):
    """What the completions of a file were made for."""

    TRAIN = "train"
    EVAL = "eval"
    FAILED = "failed"
    """The batch that a run stopped at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFile:
    """One file. Example: `RolloutFile(path=Path("runs/x/rollouts/eval-000010.parquet"), kind=RolloutKind.EVAL, step=10)`."""

    path: Path
    kind: RolloutKind
    step: int | None
    """None where the file's name does not say."""

    @property
    def label(self) -> str:
        """How a command names it: `12`, `eval-12`, `failed-12`, or the file's own name."""
        if self.step is None:
            return self.path.name
        return str(self.step) if self.kind is RolloutKind.TRAIN else f"{self.kind}-{self.step}"

    @property
    def run(self) -> RunFolder:
        """The run that it lies in, by its place."""
        return RunFolder(self.path.absolute().parent.parent)


def find_rollouts(path: Path) -> list[RolloutFile]:
    """The rollout files of a run folder in the order of their steps, or the one file that was named.

    Raises:
        RefusedError: there is no such folder or file, or it holds no rollouts; the message says what is there.
    """
    if path.is_file():
        if path.suffix != ".parquet":
            raise RefusedError(f"{path} is no rollout file: they end in .parquet. Give one, or a run folder.")
        return [_file(path)]
    if path.exists() and not path.is_dir():
        raise RefusedError(f"{path} is a pipe or a device: give a rollout file, or a run folder.")
    if not path.exists():
        raise RefusedError(f"{path}: no such run folder or file.{_runs_nearby()}")
    folder = RunFolder(path)
    places = (folder.rollouts, folder.failed)
    try:
        names = [entry for place in places if place.is_dir() for entry in place.iterdir() if NAME.fullmatch(entry.name)]
    except OSError as error:
        raise RefusedError(f"cannot look into {path}: {error.strerror}.") from error
    if not names:
        raise RefusedError(_no_rollouts(folder))
    order = list(RolloutKind)
    return sorted(map(_file, names), key=lambda file: (file.step or 0, order.index(file.kind)))


def choose_files(files: Sequence[RolloutFile], words: Sequence[str]) -> list[RolloutFile]:
    """The files that these words mean, in the order of their steps: `12`, `5-20`, `eval-12`, `failed-12`, `first`, `last`, `eval`, `failed`.

    Raises:
        RefusedError: a word means none of them; the message lists what there is.
    """
    wanted = {file.path for word in words for file in _meant(files, word)}
    return [file for file in files if file.path in wanted]


def choose_file(files: Sequence[RolloutFile], word: str) -> RolloutFile:
    """The one file that a word means. Raises RefusedError as `choose_files`, and for a range."""
    chosen = _meant(files, word)
    if len(chosen) > 1:
        raise RefusedError(f"`{word}` means {len(chosen)} steps; one is wanted here.")
    return chosen[0]


def _meant(files: Sequence[RolloutFile], word: str) -> list[RolloutFile]:
    word = word.strip().lower()
    train = [file for file in files if file.kind is RolloutKind.TRAIN] or list(files)
    if word in ("first", "last"):
        return [train[0 if word == "first" else -1]]
    span = RANGE.fullmatch(word)
    if span is not None:
        found = [file for file in train if file.step is not None and int(span[1]) <= file.step <= int(span[2])]
    elif word in (RolloutKind.EVAL, RolloutKind.FAILED):
        found = [file for file in files if file.kind == word][-1:]
    else:
        named = ONE_STEP.fullmatch(word)
        found = [file for file in files if named and file.step == int(named[2]) and file.kind == (named[1] or RolloutKind.TRAIN)]
    if not found:
        raise RefusedError(f"no rollouts of step `{word}`; there are: {name_steps(files)}.")
    return found


def name_steps(files: Sequence[RolloutFile]) -> str:
    """The files by label, a long list of steps shortened: `1, 2, … 80 (80 steps), eval-0, eval-80`."""
    labels = {kind: [file.label for file in files if file.kind is kind] for kind in RolloutKind}
    return ", ".join(_shortened(names) for names in labels.values() if names)


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} of them)"


def _file(path: Path) -> RolloutFile:
    match = NAME.fullmatch(path.name)
    kinds = {"eval": RolloutKind.EVAL, "step": RolloutKind.FAILED}
    kind = kinds.get(match[1], RolloutKind.TRAIN) if match else RolloutKind.TRAIN
    return RolloutFile(path=path, kind=kind, step=int(match[2]) if match else None)


def _no_rollouts(folder: RunFolder) -> str:
    if folder.path.name == folder.rollouts.name and any(NAME.fullmatch(entry.name) for entry in folder.path.iterdir()):
        return f"{folder.path} is the folder of rollouts; name the run: {folder.path.parent}"
    if folder.rollouts.is_dir() or folder.recipe.is_file() or folder.logs.is_dir():
        return f"{folder.path} holds no rollouts yet: they are written at the end of every step. {folder.logs} tells how far it came."
    return f"{folder.path} is no run folder: it holds no rollouts/.{_runs_nearby()}"


def _runs_nearby() -> str:
    root = Path("runs")
    runs = sorted(entry for entry in root.iterdir() if (entry / "rollouts").is_dir()) if root.is_dir() else []
    if not runs:
        return ""
    newest = max(runs, key=lambda run: run.stat().st_mtime)
    return f" The newest below {root}/ is {newest}."
