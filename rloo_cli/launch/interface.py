"""By which of its network interfaces a machine reaches another, so that processes announce an address that the others can reach."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"


def interface_to(host: str, port: int) -> str | None:
    """The interface by which this machine sends to a host, or that has the host's own address; None where that is not known."""
    address = _source_address(host, port)
    return interface_of(address) if address is not None else None


def interface_of(address: str) -> str | None:
    """The interface that has an address of this machine; None where none has it. Every 127.x.y.z is the loopback's."""
    wanted = LOOPBACK if address.startswith("127.") else address.partition("%")[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in entries):
            return name
    return None


def network_variables(interface: str) -> dict[str, str]:
    """Environment variables by which gloo, and NCCL where it has no faster network, take an interface and no other."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _source_address(host: str, port: int) -> str | None:
    """The address from which packets to a host leave. None is sent for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
