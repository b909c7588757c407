"""`rloo doctor`: what about this machine and installation would keep a run from working well."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rloo_cli.cli.completion import complete_recipe

if TYPE_CHECKING:
    from rloo_cli.doctor.check import Check, Level

FAILED = 2
NAME_WIDTH, LEVEL_WIDTH = 11, 5
WIDEST = 110


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", show_default=False, autocompletion=complete_recipe, help="Look at what this recipe needs, too."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", show_default=False, help="Try this vLLM server; default: the recipe's, if it has one."),
    ] = None,
    key_file: Annotated[
        str | None, typer.Option("--key-file", metavar="FILE", show_default=False, help="The server's key; default: RLOO_VLLM_KEY.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", show_default=False, help="Where runs will go; default: the recipe's, else runs/."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, to paste into an issue: no secrets are in it.")] = False,
) -> None:
    """Look at this machine and installation before a run does: a line each, with the remedy where something is wrong.

    \b
    rloo doctor
    rloo doctor mine.yaml                             what this recipe needs, too
    rloo doctor --server http://gpu2:8000 --key-file key
    rloo doctor --json > doctor.json                  for an issue

    Exit code 0 where runs will work, warnings or not; 2 where something fails. It takes some seconds, most of them to import torch in two
    processes, which then try to meet as the processes of a run do. 16 MB are written into the output folder and removed again; nothing else
    is touched.
    """
    from rloo_cli.doctor.check import Level
    from rloo_cli.doctor.examine import Asked, examine

    checks = []
    for check in examine(Asked(recipe=recipe, server=server, key_file=key_file, output_dir=output_dir), os.environ):
        checks.append(check)
        if not as_json:
            _print_check(check)
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    if as_json:
        from rloo_cli.cli.page import print_json

        print_json(_document(checks, counts))
    else:
        typer.echo(f"\n{counts[Level.FAIL]} fail, {counts[Level.WARN]} warn, {counts[Level.OK]} ok")
    if counts[Level.FAIL]:
        raise typer.Exit(FAILED)


def _document(checks: Sequence[Check], counts: Mapping[Level, int]) -> dict[str, Any]:
    """All checks for machines and issues, without secrets and without the name of the home folder."""
    from rloo_cli import __version__
    from rloo_cli.cli.page import plain

    document = {
        "rloo": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "counts": {str(level): count for level, count in counts.items()},
        "checks": [plain(check) for check in checks],
    }
    return _cleaned(document)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _without_secrets(value)
    if isinstance(value, Mapping):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list | tuple) else value


def _without_secrets(text: str) -> str:
    from rloo_cli.recipe.secrets import masked, secret_values

    home = str(Path.home())
    text = masked(text, secret_values(os.environ))
    return text.replace(home, "~") if len(home) > 1 else text


def _print_check(check: Check) -> None:
    """A line, folded to the terminal's width; the remedy below it."""
    from rloo_cli.recipe.secrets import masked, secret_values
    from rloo_cli.run.visible import visible

    width = min(shutil.get_terminal_size().columns, WIDEST)
    indent = " " * (LEVEL_WIDTH + NAME_WIDTH)
    said = visible(masked(check.said, secret_values(os.environ)))
    lines = textwrap.fill(said, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False).removeprefix(indent)
    colour = {"ok": "green", "warn": "yellow", "fail": "red"}[check.level]
    typer.echo(f"{typer.style(f'{check.level:<{LEVEL_WIDTH}}', fg=colour)}{check.name:<{NAME_WIDTH}}{lines}")
    if check.remedy:
        arrow = f"{indent}→ "
        remedy = visible(masked(check.remedy, secret_values(os.environ)))
        typer.echo(textwrap.fill(remedy, width, initial_indent=arrow, subsequent_indent=f"{indent}  ", break_on_hyphens=False))
