"""`rloo rollouts rescore`: finds the function and the data, and calls the function file by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.errors import RecipeError
from rloo_cli.inspect.data_columns import MixedColumns, PromptColumns, columns_source, needs_columns
from rloo_cli.inspect.rescoring import RescoredGroup, rescore_file
from rloo_cli.inspect.reward_calls import parse_kwargs, reward_workers
from rloo_cli.inspect.rollout_files import RolloutFile
from rloo_cli.inspect.stored import StoredGroup, run_recipe
from rloo_cli.recipe.schema import RewardEntry
from rloo_cli.rewards.resolve import OFFERED, RewardSource, check_arguments
from rloo_cli.run.environment import usable_cores
from rloo_cli.run.folder import RunFolder

MOST_WORKERS = 2


def rescore_files(
    files: Sequence[RolloutFile],
    *,
    reward: str,
    kwargs: str | None,
    against: str | None,
    dataset: str | None,
    reads_data: bool,
    code_dir: str | None,
    timeout: float,
) -> dict[str, list[RescoredGroup]]:
    """The groups of each file with their new rewards, by the file's label.

    Raises:
        RlooError: each kind with its exit code.
    """
    from rich.console import Console

    entry = RewardEntry(function=reward, kwargs=parse_kwargs(kwargs), timeout=timeout)
    folder = Path(code_dir) if code_dir is not None else recorded_code_dir(files[0].run)
    if not folder.is_dir():
        raise RecipeError(f"--code-dir {folder}: no such folder")
    recipe = run_recipe(files[0].run.recipe)
    max_steps = recipe.training.max_steps if recipe is not None else 0
    workers = min(MOST_WORKERS, max(1, usable_cores() - 1))
    found = {}
    with (
        Console(stderr=True).status("importing the reward") as status,
        reward_workers(entry, code_dir=folder, num_workers=workers) as runner,
    ):
        source = runner.sources[0]
        wanted = reads_data and needs_columns(
            source.parameters, {**dict.fromkeys(OFFERED), **entry.kwargs}, takes_any_keyword=source.takes_any_keyword
        )
        columns_of = _columns_of(dataset, source, entry.kwargs) if wanted else _no_columns
        for i, file in enumerate(files):
            status.update(f"scoring step {file.label} ({i + 1} of {len(files)})")
            found[file.label] = rescore_file(file, runner, columns_of=columns_of(file), against=against, max_steps=max_steps)
    return found


def recorded_code_dir(run: RunFolder) -> Path:
    """Where the run's reward functions were imported from, as it noted; else the working directory."""
    from rloo_cli.launch.local import recorded

    noted = recorded(run, "code_dir")
    return Path(noted) if isinstance(noted, str) and Path(noted).is_dir() else Path()


def _columns_of(
    dataset: str | None, reward: RewardSource, kwargs: Mapping[str, Any]
) -> Callable[[RolloutFile], Callable[[StoredGroup], Mapping[str, Any]]]:
    """For a file, a function from a group to its columns; each kind of file has its split, read once."""
    sources: dict[str, PromptColumns | MixedColumns] = {}

    def of_file(file: RolloutFile) -> Callable[[StoredGroup], Mapping[str, Any]]:
        if file.kind not in sources:
            sources[file.kind] = columns_source(file, dataset)
            check_arguments(reward, columns=sources[file.kind].columns, kwargs=kwargs)
        return sources[file.kind].columns_of

    return of_file


def _no_columns(file: RolloutFile) -> Callable[[StoredGroup], Mapping[str, Any]]:
    return lambda group: {}
