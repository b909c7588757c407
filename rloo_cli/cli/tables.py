"""Tables: drawn by rich on a terminal, tab-separated where the output is piped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import typer

WIDEST = 100
"""Columns of a paragraph that is still easily read."""


def print_table(rows: Iterable[Sequence[str]], *, header: Sequence[str]) -> None:
    """Print rows under a header; a pipe gets one line a row, cells parted by tabs."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            typer.echo("\t".join(cell.replace("\n", " ") for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column, title in enumerate(header):
        table.add_column(title, no_wrap=column == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_entry(name: str, facts: str, sentence: str) -> None:
    """Print name and facts on a line of the terminal, the sentence below: no wider than is easily read."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    typer.echo(f"  {typer.style(name, bold=True)}  {facts}")
    typer.echo(textwrap.fill(sentence, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False))
