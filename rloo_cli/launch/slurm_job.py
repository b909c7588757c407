"""The SLURM job that this process is the batch script of, and how one is submitted."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rloo_cli.errors import RefusedError, RlooError

COMMAND_SECONDS = 60.0
END_SECONDS = 120.0
"""For SLURM to end a job that was requeued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A running job."""

    id: str

    def is_preempted(self) -> bool:
        """Whether another job wants its nodes."""
        said = self._ask("scontrol", "--oneliner", "show", "job", self.id)
        when = re.search(r"\bPreemptTime=(\S+)", said)
        return when is not None and when[1] not in ("None", "Unknown", "(null)")

    def requeue(self, say: Callable[[str], None]) -> bool:
        """Whether SLURM will start the job again; it ends this process soon."""
        try:
            _run("scontrol", "requeue", self.id)
        except RlooError as error:
            say(f"not requeued, submit it again to go on: {error.message}")
            return False
        say("requeued: the next attempt goes on from the newest checkpoint")
        return True

    def wait_for_end(self) -> None:
        """Sleep until SLURM ends this process, which it does with a job that was requeued."""
        time.sleep(END_SECONDS)

    def _ask(self, *command: str) -> str:
        with contextlib.suppress(RlooError):
            return _run(*command)
        return ""


def job_of(environ: Mapping[str, str]) -> SlurmJob:
    """The job that this process belongs to; RefusedError where it belongs to none."""
    if not environ.get("SLURM_JOB_ID", "").isdecimal():
        raise RefusedError("SLURM_JOB_ID is not set: this command is for the batch scripts that `rloo slurm` writes.")
    return SlurmJob(id=environ["SLURM_JOB_ID"])


def submit(script: str, arguments: Sequence[str] = ()) -> str:
    """The id of the job that a script became.

    Raises:
        RlooError: there is no sbatch, or it refuses; what it says is in the message.
    """
    return _run("sbatch", "--parsable", *arguments, script=script).strip().partition(";")[0]


def _run(*command: str, script: str | None = None) -> str:
    try:
        result = subprocess.run(
            command,
            input=script,
            stdin=None if script is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            env=os.environ,
        )
    except FileNotFoundError as error:
        raise RefusedError(f"no {command[0]} here: submit from a login node of the cluster, or `rloo slurm … > job.sbatch`.") from error
    except subprocess.TimeoutExpired as error:
        raise RlooError(f"{shlex.join(command)}: no answer within {COMMAND_SECONDS:.0f} s.") from error
    if result.returncode:
        said = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        raise RefusedError(f"{shlex.join(command)}: {said}")
    return result.stdout


def refuse_broken_setup(lines: Sequence[str]) -> None:
    """Raise RefusedError where the lines of shell are none, or end the script before it trains."""
    if leaving := next((line for line in lines if re.match(r"\s*(exit|return)\b", line)), None):
        raise RefusedError(f"--setup {leaving!r}: would end the script before it trains.")
    bash = shutil.which("bash")
    if not lines or bash is None:
        return
    parsed = subprocess.run([bash, "-n"], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True)
    if parsed.returncode:
        said = next(iter(parsed.stderr.strip().splitlines()), "not understood").partition("bash: ")[2]
        raise RefusedError(f"--setup {' / '.join(lines)!r}: no lines of shell: {said}.")
