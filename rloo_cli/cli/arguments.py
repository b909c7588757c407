"""What several commands take: the recipe, `--set`, `--code-dir`, and `--resume` with or without a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

RESUME_LATEST = "latest"
RESUME_AUTO = "auto"

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", show_default=False, help="A YAML file, or the name of a shipped recipe such as `quickstart`.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field, by its name or dotted path; the value is YAML. Can be given several times."
    ),
]
CodeDirOption = Annotated[
    str | None,
    typer.Option(
        "--code-dir", metavar="DIR", show_default=False, help="Where reward functions are imported from; default: the recipe's folder."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's folder run code of its own. Never read from a recipe.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the last line only.")]


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--resume` given a value where it has none: `latest`.

    typer has no options with an optional value. A value needs `=`, except for a step number, `latest` and `auto`, which cannot be
    mistaken for a recipe: `--resume`, `--resume=PATH`, `--resume=40` and `--resume 40` all work.
    """
    expanded: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*expanded, argument, *rest]
        if argument == "--resume":
            has_value = bool(rest) and (rest[0].isdecimal() or rest[0] in (RESUME_LATEST, RESUME_AUTO))
            argument = f"--resume={rest.pop(0) if has_value else RESUME_LATEST}"
        expanded.append(argument)
    return expanded
