"""Ports for the steps of a SLURM job, free on the node that asks."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from rloo_cli.errors import RefusedError

FIRST, LAST = 20000, 32767
"""Below the range from which the kernel takes ports for outgoing connections, so that none of those is in the way a moment later."""


def free_port(number: int, *, job: int) -> int:
    """The number-th free port (from 1) of this node, in an order that the job's id decides: jobs that share a node begin at other ends.

    Raises:
        RefusedError: there are not so many.
    """
    for port in _order(job):
        if _is_free(port):
            number -= 1
        if not number:
            return port
    raise RefusedError(f"no free port from {FIRST} to {LAST} on {socket.gethostname()}.")


def _order(job: int) -> Iterator[int]:
    ports = list(range(FIRST, LAST + 1))
    random.Random(job).shuffle(ports)  # noqa: S311 - an order, no secret
    yield from ports


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError:
            return False
    return True
