"""`rloo import-trl`: a recipe from a Python script that trains by TRL's RLOOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_trl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", show_default=False, help="It is read, never run.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="RECIPE.yaml", show_default=False, help="Where the recipe goes; default: beside the script."
        ),
    ] = None,
) -> None:
    """Write a recipe from a script's RLOOConfig and the arguments of its RLOOTrainer.

    \b
    rloo import-trl train.py                    train.yaml, and train_rewards.py with its reward functions
    rloo import-trl train.py -o recipes/mine.yaml

    The script is read, not run. What could not be read is listed by line, and what means something else here than in TRL, on standard
    error and as comments of the recipe. Nothing is overwritten. A YAML file for `trl rloo` needs no import: it is a recipe as it is.
    """
    from rloo_cli.run.visible import visible
    from rloo_cli.trl_import.write import import_script

    done = import_script(script, output)
    for title, lines in (("not carried over", done.unread), ("not as in TRL", done.different), ("before it runs", done.missing)):
        for line in lines:
            typer.echo(f"{title}: {visible(line)}", err=True)
    beside = f", its reward functions: {visible(str(done.module))}" if done.module else ""
    typer.echo(f"recipe: {visible(str(done.recipe))}{beside}")
