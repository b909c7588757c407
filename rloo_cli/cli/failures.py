"""How a failure reaches the user: one line on standard error, the traceback in a file."""

from __future__ import annotations

import os
import tempfile
import traceback

import typer

from rloo_cli.errors import RlooError
from rloo_cli.recipe.secrets import masked, secret_values
from rloo_cli.run.visible import visible


def report_error(error: RlooError) -> None:
    """Print the error's message; what a terminal would obey in a quoted value is spelled out, secrets are not shown."""
    message = visible(masked(error.message, secret_values(os.environ)))
    typer.echo(f"error: {message}" if "\n" not in message else message, err=True)


def report_bug(error: Exception) -> None:
    """Print one line that names the exception and the file that holds its traceback."""
    first_line = visible(masked((str(error).splitlines() or [""])[0], secret_values(os.environ)))
    where = _write_traceback(error)
    typer.echo(f"bug: {type(error).__name__}: {first_line} (traceback in {where}). This is a fault in rloo: please report it.", err=True)


def _write_traceback(error: Exception) -> str:
    """Where the traceback is: in the run's log, which a note on the exception names, or in a new temporary file."""
    from rloo_cli.launch.record import LOG_NOTE

    for note in getattr(error, "__notes__", []):
        if note.startswith(LOG_NOTE):
            return str(note.removeprefix(LOG_NOTE))
    with tempfile.NamedTemporaryFile("w", prefix="rloo-traceback-", suffix=".log", delete=False, encoding="utf-8") as file:
        file.write(masked("".join(traceback.format_exception(error)), secret_values(os.environ)))
    return file.name
