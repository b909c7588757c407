"""`rloo show`: a recipe or a run's recipe as resolved, where each value comes from, and what differs between two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.arguments import SetOption
from rloo_cli.cli.completion import complete_recipe_or_run
from rloo_cli.errors import RecipeError, RefusedError

if TYPE_CHECKING:
    from rloo_cli.recipe.load import LoadedRecipe


def show(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            show_default=False,
            autocompletion=complete_recipe_or_run,
            help="A YAML file, the name of a shipped recipe, or a run folder.",
        ),
    ],
    overrides: SetOption = None,
    sources: Annotated[bool, typer.Option("--sources", help="List every value with where it comes from.")] = False,
    other: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="RECIPE|RUN",
            show_default=False,
            autocompletion=complete_recipe_or_run,
            help="Show only what differs from this one.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print a recipe as resolved: `extends` and --set applied, every default written out. Reward functions are not looked for.

    \b
    rloo show mine.yaml                              YAML, which trains just the same
    rloo show mine.yaml --set beta=0.1 > other.yaml
    rloo show mine.yaml --sources                    file and line, --set, default, rule
    rloo show mine.yaml --diff quickstart            what differs, in two columns
    rloo show runs/a --diff runs/b --json            two runs, for machines

    --set applies to the first one. A run's recipe is its recipe.yaml, in which every `auto` is decided.
    """
    if sources and other is not None:
        raise typer.BadParameter("one of them at a time.", param_hint="--sources, --diff")
    loaded = load_named(recipe, overrides or [])
    if other is not None:
        _show_differences(loaded, load_named(other, []), (recipe, other), as_json=as_json)
    elif sources:
        _show_sources(loaded, as_json=as_json)
    elif as_json:
        from rloo_cli.cli.page import print_json

        print_json(loaded.recipe.model_dump(mode="json"))
    else:
        from rloo_cli.cli.page import echo
        from rloo_cli.recipe.dump import dump_recipe

        echo(dump_recipe(loaded.recipe))


def load_named(name: str, overrides: list[str]) -> LoadedRecipe:
    """The recipe of a file, a shipped name or a run folder.

    Raises:
        RecipeError: there is none, or it is wrong.
        RefusedError: a folder that is no run.
    """
    from rloo_cli.plan.shipped import find_recipe, why_missing
    from rloo_cli.recipe.load import load_recipe

    path = Path(name)
    if path.is_dir():
        if not (path / "recipe.yaml").is_file():
            raise RefusedError(f"{name} is a folder without a recipe.yaml: give a recipe's file, or a run folder.")
        return load_recipe(path / "recipe.yaml", overrides=overrides)
    file = find_recipe(name)
    if why := why_missing(file):
        raise RecipeError(why)
    return load_recipe(file, overrides=overrides)


def _show_sources(loaded: LoadedRecipe, *, as_json: bool) -> None:
    from rloo_cli.cli.page import print_json
    from rloo_cli.inspect.recipe_sources import sourced_values
    from rloo_cli.inspect.recipe_values import shown_value

    values = sourced_values(loaded)
    if as_json:
        print_json(values)
        return
    _print_columns([(each.field, shown_value(each.value), each.words) for each in values], ("field", "value", "from"))


def _show_differences(one: LoadedRecipe, two: LoadedRecipe, names: tuple[str, str], *, as_json: bool) -> None:
    from rloo_cli.cli.page import print_json
    from rloo_cli.inspect.recipe_values import differences, json_values, shown_value

    found = differences([one.recipe, two.recipe])
    if as_json:
        print_json({"left": names[0], "right": names[1], "differences": [json_values(each, ("left", "right")) for each in found]})
        return
    if not found:
        typer.echo("no difference", err=True)
        return
    _print_columns([(each.field, *map(shown_value, each.values)) for each in found], ("field", *names))


def _print_columns(rows: list[tuple[str, ...]], header: tuple[str, ...]) -> None:
    """A table with long values folded on a terminal, lines parted by tabs in a pipe."""
    from rloo_cli.cli.page import columns, new_console, print_page
    from rloo_cli.cli.tables import print_table
    from rloo_cli.run.visible import visible

    rows = [tuple(visible(cell) for cell in row) for row in rows]
    if not sys.stdout.isatty():
        print_table(rows, header=header)
        return
    table = columns(header, left=header)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    print_page(new_console(), [table])
