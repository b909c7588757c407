"""Where the server listens, and who can reach it there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from rloo_cli.errors import EngineError, RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port. Example: `Address(host="127.0.0.1", port=8000)`."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether programs of this machine alone reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def near(self) -> str:
        """The host that reaches it from this machine."""
        ip = ipaddress.ip_address(self.host)
        if not ip.is_unspecified:
            return self.host
        return "127.0.0.1" if ip.version == 4 else "::1"

    @property
    def url(self) -> str:
        """What the recipe of a trainer says; a server on all interfaces is named as its machine is."""
        host = socket.gethostname() if ipaddress.ip_address(self.host).is_unspecified else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def parse_address(host: str, port: int) -> Address:
    """The address, with names resolved; `localhost` is 127.0.0.1.

    Raises:
        RefusedError: no such host, or a port out of range.
    """
    if not 1 <= port <= 65535:
        raise RefusedError(f"--port {port}: ports go from 1 to 65535.")
    if host.lower() == "localhost":
        host = "127.0.0.1"
    try:
        return Address(host=str(ipaddress.ip_address(host.strip("[]"))), port=port)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RefusedError(
            f"--host {host}: no such host ({error}). Give an address of this machine, or leave it out: 127.0.0.1."
        ) from error
    return Address(host=str(found[0][4][0]), port=port)


def check_free(address: Address) -> None:
    """Raise EngineError if something listens there already, RefusedError if it is no address of this machine."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise _explain(error, address) from error


def _explain(error: OSError, address: Address) -> EngineError | RefusedError:
    if error.errno == errno.EADDRINUSE:
        return EngineError(f"port {address.port} of {address.host} is in use: another server? Stop it, or choose another --port.")
    if error.errno == errno.EACCES:
        return RefusedError(f"--port {address.port} needs more rights than this user has: choose one from 1024 on.")
    return RefusedError(f"--host {address.host}: cannot listen there ({error.strerror}). Give an address of this machine.")
