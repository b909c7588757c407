"""`rloo plan`: everything about a run but the training."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rloo_cli.cli.arguments import (
    CodeDirOption,
    RecipeArgument,
    SetOption,
    TrustOption,
    launch_overrides,
    number_or_auto,
    options_named,
)
from rloo_cli.errors import RefusedError


def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    num_processes: Annotated[
        str | None,
        typer.Option(
            "--num-processes",
            metavar="N|auto",
            parser=number_or_auto,
            show_default=False,
            help="Processes of all machines; default: run.num_processes.",
        ),
    ] = None,
    num_machines: Annotated[
        int | None,
        typer.Option("--num-machines", metavar="N", min=1, show_default=False, help="Machines; default: as many as eight GPUs each make."),
    ] = None,
    accelerate_config: Annotated[
        str | None,
        typer.Option(
            "--accelerate-config",
            metavar="NAME|FILE",
            show_default=False,
            help="ddp, fsdp2, zero2, zero3 or a file of `accelerate config`; default: run.accelerate_config.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", show_default=False, help="Plan for such GPUs, as h100-80; default: for what is here."),
    ] = None,
    code_dir: CodeDirOption = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Check the recipe alone: no model, no data, no network.")] = False,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Load the model, sample a few groups as training would, and compare the log-probs of both sides."),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Load the model, take a few steps as training would, reward functions and all, and project time; nothing is kept.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Check a recipe as `rloo train` would, and tell what the run would do: batches, steps, memory, disk, time, the first prompt.

    \b
    rloo plan recipes/quickstart.yaml
    rloo plan mine.yaml --set num_generations=16      would it still fit?
    rloo plan mine.yaml --num-processes 32 --accelerate-config zero3 --gpu h100-80     and on those?
    rloo plan mine.yaml --no-model                    the recipe alone, at once
    rloo plan mine.yaml --engine                      do engine (vLLM) and trainer agree?
    rloo plan mine.yaml --measure                     how long would it take?
    rloo plan mine.yaml --json | jq .memory.bytes.peak
    """
    from rloo_cli.plan.devices import check_gpu, find_device
    from rloo_cli.plan.prepare import check_recipe
    from rloo_cli.plan.render import render_plan
    from rloo_cli.plan.report import engine_document, launch_command, recipe_document
    from rloo_cli.plan.spread import check_machines
    from rloo_cli.run.visible import visible

    _check_looks(no_model=no_model, engine=engine, measure=measure)
    check_gpu(gpu)
    overrides = overrides or []
    launch = {"--num-processes": num_processes, "--num-machines": num_machines, "--accelerate-config": accelerate_config}
    asked = launch_overrides(num_processes, accelerate_config)
    with options_named(asked):
        checked = check_recipe(recipe, overrides=[*overrides, *asked], code_dir=code_dir, num_machines=num_machines, is_training=True)
    check_machines(checked.loaded.num_processes, checked.loaded.num_machines)
    if measure:
        from rloo_cli.launch.measure import check_measurable

        check_measurable(checked.loaded)
    document, fault = recipe_document(checked), None
    document["command"] = launch_command(recipe, overrides, code_dir=code_dir, trust_remote_code=trust_remote_code, launch=launch)
    if no_model:
        from rloo_cli.plan.extras import missing_extras

        document["notes"] += missing_extras(checked.loaded.recipe)
    else:
        from rloo_cli.launch.local import waiting
        from rloo_cli.plan.prepare import errors_placed, prepare, reward_runner
        from rloo_cli.plan.report import add_data

        with reward_runner(checked, log_dir=None) as rewards, errors_placed(checked.loaded):
            with waiting("importing rewards, reading the data"):
                prepared = prepare(checked, rewards, trust_remote_code=trust_remote_code, needs_weights=engine or measure)
                from rloo_cli.plan.resources import add_resources

                add_data(document, prepared)
                fault = add_resources(document, prepared, find_device(gpu), trust_remote_code=trust_remote_code)
            if engine:
                from rloo_cli.launch.engine_check import check_engine_here

                with waiting("sampling a few groups"):
                    document["engine"] = engine_document(prepared.recipe, check_engine_here(prepared, trust_remote_code=trust_remote_code))
            if measure:
                from rloo_cli.launch.measure import measure_here
                from rloo_cli.plan.projection import measured_document
                from rloo_cli.plan.report import longest_completion

                with waiting("taking a few steps, of which nothing is kept"):
                    found = measure_here(prepared, trust_remote_code=trust_remote_code)
                document["measured"] = measured_document(
                    found, total_steps=prepared.total_steps, completion_max=longest_completion(prepared)
                )
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False) if as_json else visible(render_plan(document)))
    if fault is not None:
        raise RefusedError(fault)


def _check_looks(*, no_model: bool, engine: bool, measure: bool) -> None:
    """Raise RefusedError for looks at the model that exclude each other."""
    if no_model and (engine or measure):
        raise RefusedError(f"{'--engine' if engine else '--measure'} needs the model that --no-model leaves out: give one of them.")
    if engine and measure:
        raise RefusedError("--engine and --measure each load the model: give one at a time.")
