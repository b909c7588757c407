"""One of several processes that train, as the launcher starts them: `BOOT` with the job's file and the folder that the package is in.

It says nothing but what the main rank shows; how it ended is in `rank-K.json` and its exit code, and the launcher tells.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rloo_cli.launch.job import read_job
from rloo_cli.launch.local import train_rank
from rloo_cli.launch.record import exit_code_of
from rloo_cli.rewards.processes import die_with
from rloo_cli.run.signals import STOP_SIGNALS, StopSignal

BOOT = "import sys; sys.path.append(sys.argv.pop()); from rloo_cli.launch.rank import main; main()"
LAUNCHER = "RLOO_LAUNCHER"
"""Environment variable with the launcher's pid: this process is one of its ranks, and ends with it."""


def run(job_file: Path, *, rank: int) -> int:
    """The exit code of a rank's part of a job."""
    with StopSignal(is_led=True, tells=rank == 0) as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back by the launcher until they would be heard
        try:
            train_rank(read_job(job_file.read_text(encoding="utf-8"), rank=rank), stop)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - train_rank has recorded it
            return exit_code_of(error)
    return 0


def main() -> None:
    """Run the rank that the environment and the command line name, and exit with its code."""
    die_with(int(os.environ[LAUNCHER]))
    sys.exit(run(Path(sys.argv[1]), rank=int(os.environ["RANK"])))
