"""`rloo launch-config`: how a model can lie over processes, and the files that say so."""

from __future__ import annotations

from typing import Annotated

import typer

from rloo_cli.cli.tables import print_table
from rloo_cli.errors import RefusedError
from rloo_cli.recipe.accelerate_config import CONFIGS
from rloo_cli.recipe.accelerate_keys import STRATEGIES

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and print the configurations that --accelerate-config takes.")


@app.command("ls")
def list_configs() -> None:
    """List the configurations, and what each does.

    \b
    rloo launch-config ls
    """
    print_table([(name, _summary(name)) for name in STRATEGIES], header=("name", "what it does"))


@app.command("show", short_help="Print a configuration, to keep or to change.")
def show_config(name: Annotated[str, typer.Argument(metavar="NAME", help="One of those that `ls` lists.", show_default=False)]) -> None:
    """Print a configuration: a file that `rloo train --accelerate-config` and `accelerate launch --config_file` both take.

    \b
    rloo launch-config show fsdp2 > mine.yaml
    rloo train recipe.yaml --accelerate-config mine.yaml
    """
    if name not in STRATEGIES:
        raise RefusedError(f"no configuration {name[:60]!r}: there are {', '.join(STRATEGIES)}.")
    typer.echo(_text(name), nl=False)


def _text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")


def _summary(name: str) -> str:
    """The first sentence of a file's comment."""
    comment = " ".join(line.removeprefix("#").strip() for line in _text(name).splitlines() if line.startswith("#"))
    return comment.removeprefix(f"{name}: ").partition(". ")[0]
