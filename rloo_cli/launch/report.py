"""The page about a run, made at its end by a process of its own: whatever happens to it, the run is done and its model is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rloo_cli.run.folder import RunFolder

SECONDS_ALONE, SECONDS_AMONG_RANKS = 120.0, 20.0
"""For a page that takes two. The other ranks have ended by now, and whoever leads them does not wait long for the main one."""
BOOT = "import sys; sys.path.append(sys.argv.pop()); from rloo_cli.__main__ import main; main()"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
LONGEST_REASON = 200


def write_report(folder: RunFolder, *, is_alone: bool) -> str:
    """Write `report.html` into a run folder; a line for the terminal that says where it is, or why there is none."""
    deadline = SECONDS_ALONE if is_alone else SECONDS_AMONG_RANKS
    command = [sys.executable, "-P", "-c", BOOT, "report", str(folder.path), PACKAGE_ROOT]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return _warning(f"it took more than {deadline:.0f} s", folder)
    except OSError as error:
        return _warning(str(error), folder)
    if done.returncode != 0:
        return _warning(next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")[:LONGEST_REASON], folder)
    return f"report: {folder.report}"


def _warning(reason: str, folder: RunFolder) -> str:
    return f"warning: the run is complete, but no report was written ({reason}). Again: rloo report {folder.path}"
