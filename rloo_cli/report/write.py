"""The report as a file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rloo_cli.report.page import render
from rloo_cli.report.run_view import view_runs
from rloo_cli.run import atomic


def write_report(runs: Sequence[Path], output: Path, *, now: datetime) -> None:
    """Write the report of these run folders, whole or not at all.

    Raises:
        RefusedError: a folder holds no run, or nothing of it yet.
        StorageError: the file could not be written.
    """
    atomic.write_file(output, render(view_runs(runs), now=now))
