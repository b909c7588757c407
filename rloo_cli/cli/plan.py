"""`rloo plan`: everything about a run but the training."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rloo_cli.cli.arguments import CodeDirOption, RecipeArgument, SetOption, TrustOption
from rloo_cli.errors import RefusedError


def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    code_dir: CodeDirOption = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Check the recipe alone: no model, no data, no network.")] = False,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Load the model, sample a few groups as training would, and compare the log-probs of both sides."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Check a recipe as `rloo train` would, and tell what the run would do: batches, steps, memory, disk, the first prompt.

    \b
    rloo plan recipes/quickstart.yaml
    rloo plan mine.yaml --set num_generations=16      would it still fit?
    rloo plan mine.yaml --no-model                    the recipe alone, at once
    rloo plan mine.yaml --engine                      do engine (vLLM) and trainer agree?
    rloo plan mine.yaml --json | jq .memory.bytes.peak
    """
    from rloo_cli.inspect.visible import visible
    from rloo_cli.plan.prepare import check_recipe
    from rloo_cli.plan.render import render_plan
    from rloo_cli.plan.report import engine_document, launch_command, recipe_document

    if no_model and engine:
        raise RefusedError("--engine needs the model that --no-model leaves out: give one of them.")
    checked = check_recipe(recipe, overrides=overrides or [], code_dir=code_dir)
    document = recipe_document(checked)
    document["command"] = launch_command(recipe, overrides or [], code_dir=code_dir, trust_remote_code=trust_remote_code)
    if no_model:
        from rloo_cli.plan.extras import missing_extras

        document["notes"] += missing_extras(checked.loaded.recipe)
    else:
        from rloo_cli.launch.local import waiting
        from rloo_cli.plan.prepare import errors_placed, prepare, reward_runner
        from rloo_cli.plan.report import add_data

        with reward_runner(checked, log_dir=None) as rewards, errors_placed(checked.loaded), waiting("importing rewards, reading the data"):
            prepared = prepare(checked, rewards, trust_remote_code=trust_remote_code)
            from rloo_cli.plan.resources import resources_document

            add_data(document, prepared)
            document |= resources_document(prepared, trust_remote_code=trust_remote_code)
            if engine:
                from rloo_cli.launch.engine_check import check_engine_here

                document["engine"] = engine_document(prepared.recipe, check_engine_here(prepared, trust_remote_code=trust_remote_code))
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False) if as_json else visible(render_plan(document)))
