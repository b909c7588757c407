"""`rloo recipes`: the recipes that come with rloo, to read, to run and to copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.completion import complete_shipped
from rloo_cli.errors import RefusedError

if TYPE_CHECKING:
    from rloo_cli.inspect.recipe_needs import RecipeCard

app = typer.Typer(
    help="""The recipes that come with rloo. Every command that takes a recipe knows them by name.

    \b
    rloo recipes ls                     which there are, and what each needs
    rloo recipes show gsm8k             its text, with every comment
    rloo recipes cp gsm8k               gsm8k.yaml here, to change
    rloo recipes cp template my-task    a folder for a task of your own
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", show_default=False, autocompletion=complete_shipped, help="Of a shipped recipe, such as `quickstart`."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("ls", short_help="List the shipped recipes, and what each needs.")
def list_recipes(as_json: JsonOption = False) -> None:
    """List the shipped recipes: what each is about, what it runs on, what it needs.

    \b
    rloo recipes ls
    rloo recipes ls --json | jq -r '.[].path'
    """
    cards = _cards()
    if as_json:
        from rloo_cli.cli.page import print_json

        print_json(cards)
    elif sys.stdout.isatty():
        _print_cards(cards)
    else:
        from rloo_cli.cli.tables import print_table

        print_table(
            [(card.name, card.runs_on, "; ".join(card.needs), card.about) for card in cards], header=("name", "runs on", "needs", "about")
        )


@app.command("show")
def show_recipe(name: NameArgument) -> None:
    """Print a shipped recipe as it was written, comments and all. `rloo show NAME` prints it as resolved.

    \b
    rloo recipes show gsm8k
    rloo recipes show gsm8k > mine.yaml      (or `rloo recipes cp`, which keeps its paths right)
    """
    from rloo_cli.cli.page import echo

    echo(_path_of(name).read_text(encoding="utf-8"))


@app.command("cp")
def copy(
    name: NameArgument,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", show_default=False, help="Where to; a folder where NAME is one. Default: NAME.yaml here."),
    ] = None,
) -> None:
    """Copy a shipped recipe to where you can change it. The copy runs from where it lies.

    Data and models that come with rloo stay where they are, and the copy names them by absolute paths; reward functions of the recipe's own
    are copied beside it, so that you can change them. Nothing is ever overwritten.

    \b
    rloo recipes cp gsm8k
    rloo recipes cp quickstart experiments/first.yaml
    rloo recipes cp template my-task
    """
    from rloo_cli.inspect.recipe_copy import copy_folder, copy_recipe
    from rloo_cli.run.visible import visible

    source = _path_of(name)
    is_folder = source.name == "recipe.yaml"
    if is_folder:
        written = copy_folder(source.parent, Path(target or name))
    else:
        path = Path(target) if target is not None else Path(f"{source.stem}.yaml")
        written = copy_recipe(source, path / f"{source.stem}.yaml" if path.is_dir() else path)
    for path in written:
        typer.echo(visible(str(path)))
    recipe = next(path for path in written if path.suffix == ".yaml")
    typer.echo(visible(f"next: rloo plan {recipe}"), err=True)


def _cards() -> list[RecipeCard]:
    from rloo_cli.inspect.recipe_needs import recipe_card
    from rloo_cli.plan.shipped import shipped_recipes, shipped_templates

    recipes = [recipe_card(path, name=name) for name, path in shipped_recipes().items()]
    return [*recipes, *(recipe_card(path / "recipe.yaml", name=name, is_folder=True) for name, path in shipped_templates().items())]


def _path_of(name: str) -> Path:
    """The file of a shipped recipe, that of a folder to begin from included."""
    from difflib import get_close_matches

    from rloo_cli.plan.shipped import shipped_recipes, shipped_templates
    from rloo_cli.recipe.nodes import printable

    shipped = shipped_recipes() | {key: path / "recipe.yaml" for key, path in shipped_templates().items()}
    wanted = name.removesuffix(".yaml")
    if wanted not in shipped:
        near = get_close_matches(wanted, shipped, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise RefusedError(f"{printable(name)}: no shipped recipe of that name; there are {', '.join(shipped)}.{hint}")
    return shipped[wanted]


def _print_cards(cards: list[RecipeCard]) -> None:
    from rloo_cli.cli.tables import print_entry

    for card in cards:
        facts = [*(["a folder to copy"] if card.is_folder else []), *([card.runs_on] if card.runs_on else []), *card.needs]
        missing = f" ({', '.join(card.missing)} not installed here)" if card.missing else ""
        print_entry(card.name, "; ".join(facts) + missing, card.about)
