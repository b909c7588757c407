"""The watch over the processes of one machine among several: signals go to all, an end ends all, and a silent machine is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo_cli.errors import LostRankError, RlooError, StoppedError
from rloo_cli.launch.endings import Ending, error_of, last_line
from rloo_cli.launch.local_ranks import LocalRanks
from rloo_cli.launch.meeting import Meeting, error_told
from rloo_cli.launch.processes import GRACE_SECONDS, POLL_SECONDS
from rloo_cli.launch.record import log_name
from rloo_cli.run.logs import RankReport, read_rank_reports
from rloo_cli.run.signals import StopSignal

logger = logging.getLogger(__name__)

SILENT_SECONDS = 45.0
"""After these a machine is given up: powered off, stopped, or cut off. With the grace below all have ended within a minute."""
SILENT_GRACE_SECONDS = 5.0
"""For processes that wait for those of a silent machine, and will hear nothing."""


class Watch:
    """What one launcher does while processes train.

    Args:
        meeting: of the launchers.
        ranks: of this machine, started.
        stop: of this launcher.
        attempt: the log folder, which all machines see.
        share: processes of each machine.
    """

    def __init__(self, meeting: Meeting, ranks: LocalRanks, stop: StopSignal, attempt: Path, *, share: int) -> None:
        self._meeting = meeting
        self._ranks = ranks
        self._stop = stop
        self._attempt = attempt
        self._share = share
        self._endings: dict[int, Ending] = {}
        """As all machines were told, in that order."""
        self._own: list[Ending] = []
        self._lost: dict[int, RlooError] = {}
        """Machines that are given up, and what to say of them."""
        self._deadline = float("inf")
        self._is_stop_told = False

    def error_of_all(self) -> RlooError | None:
        """What the run fails with, the same on every machine; None where every process trained to its end."""
        self._meeting.contact.listen_anew()
        while not self._is_over():
            self._look()
            time.sleep(POLL_SECONDS)
        self._look()
        return self._verdict()

    def _look(self) -> None:
        if self._stop.received is not None and not self._is_stop_told:
            self._is_stop_told = True
            self._ranks.signal(self._stop.received)
            self._meeting.contact.tell("signal", name=self._stop.received)
        for ending in self._ranks.collect():
            self._own.append(ending)
            self._meeting.contact.tell("ended", ending=asdict(ending))
        for told in self._meeting.told():
            self._take(told)
        self._give_up_silent()
        if time.monotonic() > self._deadline and self._ranks.running:
            logger.warning("ranks %s did not end with the others, and are killed", self._ranks.running)
            self._ranks.kill()

    def _take(self, told: Mapping[str, Any]) -> None:
        if told["kind"] == "signal":
            self._ranks.signal(told["name"])
        elif told["kind"] == "ended":
            ending = _ending(told["ending"])
            self._endings[ending.rank] = ending
            self._end_within(GRACE_SECONDS)
            if ending.exit_code == StoppedError.exit_code:
                self._ranks.signal("SIGTERM")  # it may have heard the signal alone, and before there was a group to agree in
        elif told["kind"] == "left" and self._unended(told["machine"]):
            self._lose(told["machine"], error_told(told, f"machine {told['machine']} ({told['host']}): "), GRACE_SECONDS)

    def _give_up_silent(self) -> None:
        contact = self._meeting.contact
        if contact.broken is not None:
            self._lose(0, self._lost_error(0, "is gone with its launcher"), GRACE_SECONDS)
        for machine, seconds in contact.silence().items():
            if seconds > SILENT_SECONDS and contact.broken is None:
                how = f"was silent for {seconds:.0f} s: powered off, cut off from the network, or its launcher was ended"
                self._lose(machine, self._lost_error(machine, how), SILENT_GRACE_SECONDS)

    def _lose(self, machine: int, error: RlooError, grace: float) -> None:
        if machine in self._lost or not self._unended(machine):
            return
        logger.warning("%s", error.message)
        self._lost[machine] = error
        self._meeting.gone.setdefault(machine, error.message)
        if machine == 0:
            self._meeting.contact.give_up("machine 0 is gone, and the store with it")
        self._end_within(grace)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _is_over(self) -> bool:
        """Whether nothing is left to wait for: no process here, and no machine that may still tell how one ended."""
        if self._ranks.running:
            return False
        if self._meeting.contact.broken is not None:
            return True
        machines = range(self._meeting.cluster.num_machines)
        return all(machine in self._lost or not self._unended(machine) for machine in machines)

    def _unended(self, machine: int) -> list[int]:
        """The machine's ranks of whose end nothing is known."""
        return [rank for rank in range(machine * self._share, (machine + 1) * self._share) if rank not in self._endings]

    def _verdict(self) -> RlooError | None:
        for ending in self._own:  # of which nobody could be told
            self._endings.setdefault(ending.rank, ending)
        for report in read_rank_reports(self._attempt):  # of a machine that is gone, whose launcher could not tell
            if report.rank not in self._endings:
                self._endings[report.rank] = Ending(
                    rank=report.rank,
                    returncode=report.exit_code,
                    was_killed=False,
                    report=None if report.silent else report,
                    host=self._host_of(report.rank),
                )
        endings = list(self._endings.values())
        has_own = any(ending.has_failed and not ending.is_neighbour for ending in endings)
        lost = [error for machine, error in self._lost.items() if self._unended(machine)]
        return lost[0] if lost and not has_own else error_of(endings, self._attempt)

    def _lost_error(self, machine: int, how: str) -> LostRankError:
        rank = machine * self._share
        log = self._attempt / log_name(rank)
        said = last_line(log)
        last = f"; rank {rank} there said last: {said}" if said else ""
        return LostRankError(f"machine {machine} ({self._meeting.hosts.get(machine, 'unknown host')}) {how}{last} (log: {log}).")

    def _host_of(self, rank: int) -> str:
        return self._meeting.hosts.get(rank // self._share, "unknown host")


def _ending(document: Mapping[str, Any]) -> Ending:
    report = document["report"]
    return Ending(**{**document, "report": RankReport(**report) if report is not None else None})
