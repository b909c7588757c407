"""`rloo report`: a run as one HTML page."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rloo_cli.cli.completion import complete_run

SEVERAL = "report.html"
"""Where the report of several runs goes: into the working folder, since it is none of theirs alone."""


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…", show_default=False, autocompletion=complete_run, help="Run folders; several are laid over each other."
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Default: RUN/report.html; of several runs, ./report.html."
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML page about a run, or about several: verdict, health, curves, rollouts, recipe, environment.

    \b
    rloo report runs/mine                          runs/mine/report.html
    rloo report runs/mine --open
    rloo report runs/a runs/b --output both.html   curves laid over each other

    `rloo train` writes it at the end of a run. The page needs no network and runs nothing that a model wrote; runs that are under way or
    damaged are shown as far as they can be read.
    """
    from rloo_cli.report.write import write_report
    from rloo_cli.run.folder import RunFolder
    from rloo_cli.run.visible import visible

    target = Path(output) if output else RunFolder(Path(runs[0])).report if len(runs) == 1 else Path(SEVERAL)
    write_report([Path(run) for run in runs], target, now=datetime.now().astimezone())
    typer.echo(f"report: {visible(str(target))}")
    if is_opened:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())
