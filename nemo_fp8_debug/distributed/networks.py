"""By which address other hosts reach this one: as gloo chooses it, and as the route to the run's store has it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Network:
    """Where a rank is; plain values, which ranks tell each other."""

    #: the same for all processes that one loopback interface connects
    loopback_of: str
    host: str
    #: by which gloo connects, as far as that follows from the name of the host; None: an interface is named
    gloo: str | None
    #: on the way to the host of the store, and towards hosts at all; loopback on the host of the store, perhaps
    route: str

    @classmethod
    def here(cls, store: tuple[str, int] | None) -> Network:
        """That of this process.

        Args:
            store: address of the run's store; None: it is a file.
        """
        gloo = None if list_interfaces() else address_of_name()
        return cls(_loopback(), socket.gethostname(), gloo, _route(store) or gloo or "127.0.0.1")

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def list_interfaces() -> list[str]:
    """Those that `GLOO_SOCKET_IFNAME` names, read as torch reads it; none: the name of the host decides."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [name for name in named.split(",") if name] if len(named) > 1 else []


def address_of_name() -> str:
    """The first address of the host's name that can be bound to, else loopback: what gloo takes."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for shard_group, kind, protocol, _, address in found:
        try:
            with socket.socket(shard_group, kind, protocol) as tried:
                tried.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def explain_unreachable(networks: Sequence[Network]) -> str | None:
    """What to set where ranks on several hosts cannot be connected, in a line; None: they can be, as far as is known."""
    if len({network.loopback_of for network in networks}) == 1:
        return None
    for rank, network in enumerate(networks):
        if network.gloo is not None and is_loopback(network.gloo):
            which = "" if is_loopback(network.route) else f", on {network.host} that of {network.route}"
            return (
                f"the name of host {network.host} (rank {rank}) resolves to {network.gloo}, which other hosts cannot reach; "
                f"set GLOO_SOCKET_IFNAME to the network interface between the hosts{which}"
            )
    return None


def is_loopback(address: str) -> bool:
    """Whether it leads to the host itself."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _loopback() -> str:
    """Containers of one host have the same boot, and hosts the same number of a namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def _route(store: tuple[str, int] | None) -> str | None:
    """The address that packets to the store's host leave with; nothing is sent."""
    if store is None:
        return None
    try:
        shard_group, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(shard_group, kind, protocol) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:
        return None
