"""Several machines that train together, each with a launcher of its own and the same command.

The launcher of machine 0 leads: it checks the recipe, chooses and locks the run folder, and says what is done. The others start their
processes with the same job, which they read from the run folder, since all machines see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rloo_cli import __version__
from rloo_cli.errors import StoppedError, StorageError
from rloo_cli.launch.cluster import Cluster, local_share
from rloo_cli.launch.job import dump_job
from rloo_cli.launch.local import held, new_job, terminal
from rloo_cli.launch.local_ranks import LocalRanks
from rloo_cli.launch.meeting import JOB, NOTHING, Greeting, Meeting, joined, opened
from rloo_cli.launch.processes import JOB_FILE, Spread, crowding_told, environments, gpus_for
from rloo_cli.launch.target import Target
from rloo_cli.launch.watch import Watch
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.recipe.processes import visible_gpus
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import logging_to
from rloo_cli.run.signals import StopRequested, StopSignal

logger = logging.getLogger(__name__)

SHARED_SECONDS = 60.0
"""For a file that machine 0 has written to be seen on another machine: network file systems remember for a while that it was not there."""
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Lead:
    """Machine 0, with the store open."""

    meeting: Meeting

    def tell_nothing(self) -> None:
        """Tell the other machines that there is nothing to do."""
        self.meeting.speak(NOTHING)

    def train(self, checked: CheckedRecipe, target: Target, *, trust_remote_code: bool, quiet: bool) -> None:
        """Train to the end in `target.folder`, which is locked meanwhile, together with the other machines.

        Raises:
            RlooError: that of the first process, of whatever machine, that failed for a reason of its own; or a machine is gone.
        """
        cluster, console = self.meeting.cluster, terminal(quiet=quiet)
        greeting = _greeting(cluster, checked)
        with StopSignal() as stop:
            with _stop_told(), stop.at_once():
                self.meeting.gather(greeting, lambda line: console.print(line, markup=False))
            with held(target) as (attempt, notes), logging_to(attempt / _log_name(cluster), environment=os.environ):
                loaded = checked.loaded
                place = "a GPU each" if greeting.gpus else "on the CPU"
                share = local_share(loaded.num_processes, loaded.num_machines)
                notes = (
                    *notes,
                    f"{loaded.num_processes} processes on {loaded.num_machines} machines train together, {place}",
                    *crowding_told(share, greeting.gpus),
                )
                job = new_job(checked, target, attempt, notes, trust_remote_code=trust_remote_code, quiet=quiet)
                logger.info("%s", shlex.join(job.command))
                text = dump_job(job)
                atomic.write_file(attempt / JOB_FILE, text)
                self.meeting.speak(JOB, folder=str(Path.cwd()), attempt=str(attempt), job=_digest(text))
                with stop.telling(lambda line: None):  # the main rank, which has the terminal, tells
                    _train(self.meeting, checked, attempt, stop)


@contextlib.contextmanager
def leading(cluster: Cluster) -> Iterator[Lead]:
    """Machine 0 for the block; however that ends, the other machines are told."""
    with opened(cluster) as meeting:
        yield Lead(meeting)


def follow(
    cluster: Cluster, checked: CheckedRecipe, way_on_told: Callable[[RunFolder], contextlib.AbstractContextManager[None]], *, quiet: bool
) -> None:
    """Do another machine's part of what machine 0 says, which is told as on machine 0.

    Args:
        way_on_told: adds to an error of the block the command that goes on with the run in a folder.

    Raises:
        RlooError: as `Lead.train`, which says the same.
    """
    console, last = terminal(quiet=quiet), terminal(quiet=False)
    place = f"machine {cluster.machine_rank} of {cluster.num_machines}"

    def say(line: str) -> None:
        console.print(line, markup=False)

    with StopSignal() as stop, contextlib.ExitStack() as stack:
        with _stop_told(), stop.at_once():
            meeting, reached = stack.enter_context(joined(cluster, say))
            meeting.greet(_greeting(cluster, checked, reached=reached))
            word = meeting.wait_for_word(say)
        if word["word"] == NOTHING:
            last.print(f"{place}: the run is finished already, nothing to do", markup=False)
            return
        folder = Path(word["folder"])
        attempt = folder / word["attempt"]
        _wait_for_job(meeting, attempt / JOB_FILE, word["job"])
        shown = Path(word["attempt"]) if folder == Path.cwd() else attempt
        run = RunFolder(shown.parents[1])
        say(f"{place}: trains with machine 0 ({meeting.hosts[0]}), run folder {run.path}")
        with way_on_told(run), logging_to(attempt / _log_name(cluster), environment=os.environ):
            _train(meeting, checked, attempt, stop, folder=folder)
        last.print(f"done: {place}, {run.path}", markup=False)


def _train(meeting: Meeting, checked: CheckedRecipe, attempt: Path, stop: StopSignal, *, folder: Path | None = None) -> None:
    """Start this machine's processes, and end as all of them did."""
    cluster, count = meeting.cluster, checked.loaded.num_processes
    share = local_share(count, cluster.num_machines)
    spread = Spread(
        local=share,
        world=count,
        machine_rank=cluster.machine_rank,
        host=cluster.host,
        port=cluster.port,
        has_store=True,
        interface=meeting.interface,
    )
    logger.info("machines: %s; network: %s", meeting.hosts, meeting.interface)
    with LocalRanks(attempt, attempt / JOB_FILE, environments(spread, os.environ, gpus=gpus_for(share)), folder=folder) as ranks:
        error = Watch(meeting, ranks, stop, attempt, share=share).error_of_all()
    logger.info("%s", error.message if error is not None else "done")
    if error is not None:
        raise error


def _greeting(cluster: Cluster, checked: CheckedRecipe, *, reached: str = "") -> Greeting:
    """What this machine has come for.

    Raises:
        RefusedError: its share of the processes is no whole number, or more than there are GPUs.
    """
    loaded = checked.loaded
    gpus_for(local_share(loaded.num_processes, cluster.num_machines))
    return Greeting(
        machine=cluster.machine_rank,
        host=socket.gethostname(),
        version=f"rloo {__version__} with torch {metadata.version('torch')}",
        num_processes=loaded.num_processes,
        num_machines=cluster.num_machines,
        gpus=visible_gpus(os.environ),
        recipe=_compared(checked),
        reached=reached,
    )


def _compared(checked: CheckedRecipe) -> Mapping[str, Any]:
    """The recipe's fields, but for what machine 0 alone decides."""
    recipe = checked.loaded.recipe
    run = recipe.run.model_copy(update={"output_dir": None, "run_name": None})
    return recipe.model_copy(update={"run": run}).model_dump(mode="json")


def _wait_for_job(meeting: Meeting, file: Path, digest: str) -> None:
    """Return when this machine sees what machine 0 has written into the run folder.

    Raises:
        StorageError: it does not come to see it.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    while not _is_there(file, digest):
        if time.monotonic() > deadline:
            raise StorageError(
                f"machine {meeting.cluster.machine_rank} ({socket.gethostname()}) does not see {file}, which machine 0 ({meeting.hosts[0]}) has "
                "written: the run folder has to be on a file system that all machines share, under the same path."
            )
        time.sleep(POLL_SECONDS)


def _is_there(file: Path, digest: str) -> bool:
    with contextlib.suppress(OSError):
        list(file.parent.iterdir())  # has a network file system look again
        return _digest(file.read_text(encoding="utf-8")) == digest
    return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _log_name(cluster: Cluster) -> str:
    return f"launch-machine-{cluster.machine_rank}.log" if cluster.machine_rank else "launch.log"


@contextlib.contextmanager
def _stop_told() -> Iterator[None]:
    """Makes a StoppedError of a signal that came before there were processes."""
    try:
        yield
    except StopRequested as stop:
        raise StoppedError(
            f"stopped by {stop.signal_name} before training began: nothing was done, the same command starts again."
        ) from stop
