"""`rloo runs`: which runs there are, how one went, and several side by side."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.completion import complete_run

if TYPE_CHECKING:
    from rloo_cli.inspect.run_state import RunFacts

app = typer.Typer(
    help="""Look at runs: which there are, how one went, several side by side.

    \b
    rloo runs ls                        those in runs/: state, steps, rewards, when
    rloo runs show runs/mine            a page of one: curves, checkpoints, how to go on
    rloo runs compare runs/a runs/b     numbers side by side, and where the recipes differ

    Nothing is changed, and a run may go on meanwhile. Damaged folders are shown as far as they can be read. `--json` is for machines.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_run, help="A run folder.")]
RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN…", show_default=False, autocompletion=complete_run, help="Two run folders or more.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("ls", short_help="List runs, the latest last.")
def list_runs(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", autocompletion=complete_run, help="Where runs are looked for, sub-folders too.")
    ] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List runs, the latest last: state, steps, rewards, best evaluation, when it began, how long it ran.

    \b
    rloo runs ls
    rloo runs ls experiments
    rloo runs ls --json | jq -r '.[] | select(.state == "failed") | .path'

    States: running (its folder is locked), finished, stopped (by a signal, saved), failed (with the exit code), died (without a word: killed,
    or the machine went down), empty.
    """
    from rloo_cli.inspect.run_state import find_runs

    facts = sorted((_facts(path) for path in find_runs(Path(folder))), key=_start)
    if as_json:
        from rloo_cli.cli.page import print_json

        print_json([each.summary for each in facts])
        return
    from rloo_cli.cli.runs_view import LIST_LEFT, list_rows, reasons

    header, rows = list_rows([each.summary for each in facts], Path(folder), with_reason=not sys.stdout.isatty())
    _print_table(header, rows, left=LIST_LEFT)
    if sys.stdout.isatty():
        from rloo_cli.cli.page import new_console, print_page

        print_page(new_console(), reasons([each.summary for each in facts], Path(folder)))


@app.command("show", short_help="Show one run on a page.")
def show_run(
    run: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Hold every byte of the checkpoints against its hash, not sizes alone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one run on a page: what it is, where its recipe differs from the defaults, curves, checkpoints, attempts, warnings, what next.

    \b
    rloo runs show runs/mine
    rloo runs show runs/mine --verify      read the checkpoints whole
    rloo runs show runs/mine --json | jq .checkpoints
    """
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.cli.runs_view import run_document, run_parts
    from rloo_cli.inspect.run_page import saved_steps

    facts = _facts(Path(run))
    saved = saved_steps(facts.folder, contents=verify)
    if as_json:
        print_json(run_document(facts, saved))
    else:
        console = new_console()
        print_page(console, run_parts(console, facts, saved))


@app.command("compare", short_help="Compare runs: numbers side by side, and their recipes.")
def compare_runs(runs: RunsArgument, as_json: JsonOption = False) -> None:
    """Compare runs: rewards, lengths, speed side by side, and the fields in which their recipes differ.

    \b
    rloo runs compare runs/a runs/b
    rloo runs compare runs/sweep-* --json

    Rewards of training are means over the last tenth of the steps. Completions: `rloo rollouts diff`.
    """
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.cli.runs_view import comparison_document, comparison_parts, comparison_rows

    if len(set(runs)) < 2:
        raise typer.BadParameter("two run folders or more are compared.", param_hint="RUN…")
    facts = [_facts(Path(run)) for run in dict.fromkeys(runs)]
    if as_json:
        print_json(comparison_document(facts))
    elif sys.stdout.isatty():
        console = new_console()
        print_page(console, comparison_parts(console, facts))
    else:
        header, rows = comparison_rows(facts)
        _print_table(header, rows, left=header)


def _facts(path: Path) -> RunFacts:
    from rloo_cli.inspect.run_state import read_facts

    return read_facts(path, now=datetime.now().astimezone())


def _start(facts: RunFacts) -> tuple[float, str]:
    started = facts.summary.started
    return (started.timestamp() if started is not None else 0.0, str(facts.summary.path))


def _print_table(header: list[str], rows: list[list[str]], *, left: list[str]) -> None:
    from rloo_cli.cli.page import fitting_tables, new_console, print_page
    from rloo_cli.cli.tables import print_table
    from rloo_cli.run.visible import on_one_line

    rows = [[on_one_line(cell, 1000) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        print_table(rows, header=header)
        return
    print_page(new_console(), fitting_tables(new_console(), header, rows, left=left, own=6))
