"""`rloo train`: from a recipe to a trained model in a run folder."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.arguments import CodeDirOption, QuietOption, RecipeArgument, SetOption, TrustOption
from rloo_cli.errors import EngineError, InterruptedTwiceError, NeighbourError, StoppedError

if TYPE_CHECKING:
    from rloo_cli.launch.given import Place
    from rloo_cli.plan.prepare import CheckedRecipe

ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[=auto|STEP|PATH]",
        show_default=False,
        help="Go on with a run: from its latest valid checkpoint, or from that of a step or path. `auto`, for scripts: start, go on, or exit 0 "
        "when finished.",
    ),
]


def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", metavar="DIR", show_default=False, help="Run folder; default: runs/RECIPE-DATE-TIME."),
    ] = None,
    resume: ResumeOption = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num-processes",
            metavar="N",
            min=1,
            show_default=False,
            help="Processes that train together; default: run.num_processes, one for each visible GPU.",
        ),
    ] = None,
    code_dir: CodeDirOption = None,
    trust_remote_code: TrustOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model from a recipe.

    \b
    rloo train recipes/quickstart.yaml
    rloo train mine.yaml --set learning_rate=2e-6 --set generation.temperature=0.8
    rloo train mine.yaml --output-dir runs/mine              and after a stop:
    rloo train mine.yaml --output-dir runs/mine --resume
    rloo train mine.yaml --output-dir runs/mine --resume=auto   in a script that may be started again

    The run folder holds metrics.jsonl (a line a step), rollouts/ (every completion), checkpoints/, logs/ and final/, the model.
    Ctrl-C saves a checkpoint and leaves with exit code 75; a second one leaves at once.
    """
    from rloo_cli.inspect.visible import visible
    from rloo_cli.launch.given import failure_told, place_of, refuse_other_number, tell_nothing
    from rloo_cli.launch.local import nothing_left
    from rloo_cli.launch.target import choose_target
    from rloo_cli.plan.prepare import check_recipe
    from rloo_cli.plan.report import launch_command
    from rloo_cli.run.checkpoint import list_steps

    place = place_of(os.environ)
    if place is not None and place.rank > 0:
        _train_as_told(place)
        return
    overrides = [*(overrides or []), *([f"run.num_processes={num_processes}"] if num_processes is not None else [])]
    with failure_told(place):
        checked = check_recipe(
            recipe, overrides=overrides, code_dir=code_dir, num_processes=place.world_size if place is not None else None
        )
        if place is not None:
            refuse_other_number(place, checked)
        loaded = checked.loaded
        target = choose_target(
            recipe_name=loaded.path.stem,
            output_dir=output_dir or loaded.recipe.run.output_dir,
            resume=resume,
            now=datetime.now().astimezone(),
        )
        if target.finished and nothing_left(checked, target.folder):
            if place is not None:
                tell_nothing(place)
            typer.echo(f"{visible(str(target.folder.path))}: finished already, nothing to do")
            return
        if not quiet:
            for notice in loaded.notices:
                typer.echo(f"note: {notice}", err=True)
        try:
            _launcher(checked, place)(checked, target, trust_remote_code=trust_remote_code, quiet=quiet)
        except (StoppedError, InterruptedTwiceError, EngineError) as stop:
            command = launch_command(
                recipe, overrides, code_dir=code_dir, trust_remote_code=trust_remote_code, resume_in=str(target.folder.path)
            )
            if not isinstance(stop, EngineError):
                raise type(stop)(f"{stop.message}\n  {command}") from stop
            if not list_steps(target.folder.checkpoints):
                raise
            raise EngineError(f"{stop.message} To go on: {command}") from stop
    typer.echo(f"done: {visible(str(target.folder.path))} (metrics.jsonl, rollouts/, final/)")


def _launcher(checked: CheckedRecipe, place: Place | None) -> Callable[..., None]:
    """Who trains: the processes that a launcher started, this one alone, or several that it starts."""
    from rloo_cli.launch.given import train_and_tell
    from rloo_cli.launch.local import train_here
    from rloo_cli.launch.processes import train_in_processes

    if place is not None:
        return functools.partial(train_and_tell, place)
    return train_here if checked.loaded.num_processes == 1 else train_in_processes


def _train_as_told(place: Place) -> None:
    """Do a rank's part; of what stops all of them, the main one tells."""
    from rloo_cli.launch.given import train_as_told

    try:
        train_as_told(place)
    except (StoppedError, NeighbourError) as error:
        raise typer.Exit(error.exit_code) from error
