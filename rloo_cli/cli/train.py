"""`rloo train`: from a recipe to a trained model in a run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.arguments import (
    CodeDirOption,
    QuietOption,
    RecipeArgument,
    SetOption,
    TrustOption,
    launch_overrides,
    number_or_auto,
    options_named,
)
from rloo_cli.errors import EngineError, InterruptedTwiceError, LostRankError, NeighbourError, StoppedError

if TYPE_CHECKING:
    from rloo_cli.launch.cluster import Cluster, MachineOptions
    from rloo_cli.launch.given import Place
    from rloo_cli.launch.machines import Lead
    from rloo_cli.plan.prepare import CheckedRecipe
    from rloo_cli.recipe.schema import RunSection
    from rloo_cli.run.folder import RunFolder

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
        str | None,
        typer.Option(
            "--num-processes",
            metavar="N|auto",
            parser=number_or_auto,
            show_default=False,
            help="Processes that train together, those of all machines; default: run.num_processes, one for each visible GPU.",
        ),
    ] = None,
    accelerate_config: Annotated[
        str | None,
        typer.Option(
            "--accelerate-config",
            metavar="NAME|FILE",
            show_default=False,
            help="How the model lies over them: ddp, fsdp2, zero2, zero3, or a file of `accelerate config`; default: run.accelerate_config.",
        ),
    ] = None,
    num_machines: Annotated[
        int | None,
        typer.Option(
            "--num-machines", metavar="N", min=1, show_default=False, help="Machines that train together, each started with this command."
        ),
    ] = None,
    machine_rank: Annotated[
        int | None, typer.Option("--machine-rank", metavar="K", min=0, show_default=False, help="Which of them this is, from 0.")
    ] = None,
    main_process_ip: Annotated[
        str | None,
        typer.Option("--main-process-ip", metavar="HOST", show_default=False, help="Name or address by which the others reach machine 0."),
    ] = None,
    main_process_port: Annotated[
        int | None,
        typer.Option("--main-process-port", metavar="P", min=1, max=65535, show_default=False, help="Where it listens; default: 29500."),
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
    rloo train mine.yaml --accelerate-config fsdp2 --num-processes 16 --num-machines 2 --main-process-ip head --machine-rank 0

    The run folder holds metrics.jsonl (a line a step), rollouts/ (every completion), checkpoints/, logs/ and final/, the model.
    Ctrl-C saves a checkpoint and leaves with exit code 75; a second one leaves at once.
    """
    from rloo_cli.launch.cluster import MachineOptions

    options = MachineOptions(
        num_machines=num_machines, machine_rank=machine_rank, main_process_ip=main_process_ip, main_process_port=main_process_port
    )
    request = _Request(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        num_processes=num_processes,
        accelerate_config=accelerate_config,
        options=options,
        output_dir=output_dir,
        resume=resume,
        code_dir=code_dir,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
    )
    with options_named(request.launch_overrides()):
        _train(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the command line asks for."""

    recipe: str
    overrides: tuple[str, ...]
    num_processes: str | None
    accelerate_config: str | None
    options: MachineOptions
    output_dir: str | None
    resume: str | None
    code_dir: str | None
    trust_remote_code: bool
    quiet: bool

    def all_overrides(self) -> list[str]:
        """Those of `--set`, and the options that are fields of the recipe."""
        return [*self.overrides, *self.launch_overrides()]

    def launch_overrides(self) -> dict[str, str]:
        """The latter, each with the option as it was given."""
        return launch_overrides(self.num_processes, self.accelerate_config)

    def way_on(self, folder: RunFolder) -> str:
        """The command that goes on with the run in a folder."""
        from rloo_cli.plan.report import launch_command

        return launch_command(
            self.recipe,
            self.overrides,
            code_dir=self.code_dir,
            trust_remote_code=self.trust_remote_code,
            resume_in=str(folder.path),
            launch={"--num-processes": self.num_processes, "--accelerate-config": self.accelerate_config, **self.options.named()},
        )


def _train(request: _Request) -> None:
    """Train as what this process is: the one that decides, or one that is told, of a launcher's processes or of several machines."""
    from rloo_cli.launch.given import failure_told, place_of, refuse_lone

    place = place_of(os.environ)
    if place is None:
        refuse_lone(_parents_words())
    if place is not None and place.rank > 0:
        _train_as_told(place)
        return
    with failure_told(place):
        checked, cluster = _checked(request, place)
        if cluster is None:
            _decide(request, checked, place)
            return
        from rloo_cli.launch.machines import follow, leading

        if cluster.is_main:
            with leading(cluster) as lead:
                _decide(request, checked, lead)
        else:
            follow(cluster, checked, lambda folder: _way_on_told(request, folder), quiet=request.quiet)


def _parents_words() -> list[str]:
    """The command line of the process that started this one; empty where it cannot be read."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(os.getppid()).cmdline()
    return []


def _checked(request: _Request, place: Place | None) -> tuple[CheckedRecipe, Cluster | None]:
    """The recipe, on as many processes as there are, and the machines, where there are several and we start the processes."""
    from rloo_cli.launch.cluster import choose_cluster, machines_asked
    from rloo_cli.launch.given import refuse_other_number
    from rloo_cli.launch.step import step_of, told_of_other_nodes
    from rloo_cli.plan.extras import check_deepspeed
    from rloo_cli.plan.prepare import check_recipe

    step = step_of(os.environ) if place is None and request.options.num_machines != 1 else None
    checked = check_recipe(
        request.recipe,
        overrides=request.all_overrides(),
        code_dir=request.code_dir,
        num_processes=place.world_size if place is not None else None,
        num_machines=place.num_machines if place is not None else machines_asked(request.options, step),
        is_training=True,
    )
    check_deepspeed(checked.loaded.distribution)
    if place is not None:
        refuse_other_number(place, checked, request.options)
        return checked, None
    cluster = choose_cluster(request.options, step, checked.loaded.distribution)
    if cluster is None and request.options.num_machines is None and (note := told_of_other_nodes(os.environ)):
        typer.echo(f"note: {note}", err=True)
    return checked, cluster


def _decide(request: _Request, checked: CheckedRecipe, others: Place | Lead | None) -> None:
    """Choose the run folder and train in it, with the others if there are some."""
    from rloo_cli.launch.hub import check_hub, is_missing_there
    from rloo_cli.launch.launcher import launcher_of
    from rloo_cli.launch.local import nothing_left
    from rloo_cli.launch.target import choose_target
    from rloo_cli.run.visible import visible

    loaded = checked.loaded
    target = choose_target(
        recipe_name=loaded.path.stem,
        output_dir=request.output_dir or loaded.recipe.run.output_dir,
        resume=request.resume,
        now=datetime.now().astimezone(),
    )
    folder = target.folder.path
    if target.finished and nothing_left(checked, target.folder):
        if others is not None:
            others.tell_nothing()
        if is_missing_there(loaded.recipe.run, target.folder):
            check_hub(loaded, target.folder)
            _upload(request, loaded.recipe.run, target.folder)
        else:
            typer.echo(f"{visible(str(folder))}: finished already, nothing to do")
        return
    away = check_hub(loaded, target.folder)
    if not request.quiet:
        for notice in [*loaded.notices, *([away] if away else [])]:
            typer.echo(f"note: {notice}", err=True)
    with _way_on_told(request, target.folder):
        launcher_of(checked, others)(checked, target, trust_remote_code=request.trust_remote_code, quiet=request.quiet)
    if loaded.recipe.run.push_to_hub:
        _upload(request, loaded.recipe.run, target.folder)
    typer.echo(f"done: {visible(str(folder))} (metrics.jsonl, rollouts/, final/)")


def _upload(request: _Request, run: RunSection, folder: RunFolder) -> None:
    """Bring the final model to the hub, and say what came of it."""
    from rloo_cli.launch.hub import upload_final
    from rloo_cli.run.visible import visible

    with _way_on_told(request, folder):
        upload = upload_final(run, folder)
    if not (upload.is_done and request.quiet):
        typer.echo(visible(upload.line), err=not upload.is_done)


@contextlib.contextmanager
def _way_on_told(request: _Request, folder: RunFolder) -> Iterator[None]:
    """Adds the command that goes on to what a stop, a lost process or a failed engine says."""
    from rloo_cli.run.checkpoint import list_steps

    try:
        yield
    except (StoppedError, InterruptedTwiceError) as stop:
        raise type(stop)(f"{stop.message}\n  {request.way_on(folder)}") from stop
    except (EngineError, LostRankError) as error:
        if not list_steps(folder.checkpoints):
            raise
        raise type(error)(f"{error.message} To go on: {request.way_on(folder)}") from error


def _train_as_told(place: Place) -> None:
    """Do a rank's part; of what stops all of them, the main one tells."""
    from rloo_cli.launch.given import train_as_told

    try:
        train_as_told(place)
    except (StoppedError, NeighbourError) as error:
        raise typer.Exit(error.exit_code) from error
