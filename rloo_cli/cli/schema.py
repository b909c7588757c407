"""`rloo schema`: the JSON Schema of a recipe, or one section's fields as a table."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def schema(
    show: Annotated[
        str | None,
        typer.Option(
            "--show",
            metavar="SECTION",
            show_default=False,
            help="Print one section's fields (or `all`) as a list instead, as a table in a pipe.",
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a recipe, for editors and checks.

    \b
    rloo schema > recipe.schema.json
    rloo schema --show training
    """
    if show is None:
        from rloo_cli.recipe.json_schema import json_schema

        typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    from rloo_cli.cli.fields import REQUIRED, SECTIONS, section_fields
    from rloo_cli.cli.tables import print_entry, print_table

    if show != "all" and show not in SECTIONS:
        raise typer.BadParameter(f"no section {show!r}. Sections: {', '.join(SECTIONS)}, all.", param_hint="--show")
    for section in SECTIONS if show == "all" else [show]:
        fields = section_fields(section)
        if sys.stdout.isatty():
            typer.secho(section, bold=True)
            for field in fields:
                default = "required" if field.default == REQUIRED else f"default {field.default}"
                print_entry(field.name, f"{field.type}, {default}", field.description)
        else:
            print_table(
                [(field.name, field.type, field.default, field.description) for field in fields],
                header=(section, "type", "default", "meaning"),
            )
