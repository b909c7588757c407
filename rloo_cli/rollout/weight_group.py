"""A process group of one trainer and the workers of a server, beside whatever torch.distributed has; both sides use it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rloo_cli.errors import EngineError

MEET_SECONDS = 45.0
"""For trainer and workers to meet, and for each operation of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where a group meets.

    Example: `GroupPlace(transport="gloo", host="127.0.0.1", port=51216, prefix="9f…", world_size=2)`
    """

    transport: str
    """gloo, or nccl."""
    host: str
    """The trainer's address, as the server reaches it."""
    port: int
    prefix: str
    """Of the store's names: a new one each time, so that nothing of a group that broke is met."""
    world_size: int
    """The trainer, rank 0, and the server's workers."""


def join_store(place: GroupPlace) -> dist.Store:
    """The store at the trainer, from a worker."""
    return dist.TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))


def make_group(place: GroupPlace, store: dist.Store, *, rank: int, device: torch.device) -> Any:
    """The process group; blocks until all are there.

    Raises:
        RuntimeError: they were not in time.
    """
    store = dist.PrefixStore(place.prefix, store)
    timeout = timedelta(seconds=MEET_SECONDS)
    if place.transport == "gloo":
        options: Any = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        # The address that the other side reaches, whatever GLOO_SOCKET_IFNAME says for a process' own groups.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(place.host, place.port))]
        group: Any = dist.ProcessGroupGloo(store, rank, place.world_size, options)
    else:  # has never run: it takes two GPUs
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, place.world_size, options)
    group.broadcast([torch.zeros(1, device=device)], from_trainer()).wait()  # NCCL connects at its first operation
    return group


def from_trainer() -> Any:
    """Options of a broadcast whose source is the trainer."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def own_address(host: str | None, port: int) -> str:
    """The address of this machine from which `host` is reached, and at which it reaches us.

    Raises:
        EngineError: the name is not known.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"the host {host!r:.200} is not known here: {error.strerror}") from error
