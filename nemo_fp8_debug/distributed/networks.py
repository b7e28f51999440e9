"""Find the addresses at which other hosts can reach this host: the address that gloo chooses, and the address on the route
to the run's store.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class NetworkAddresses:
    """A rank's network addresses, as plain values that ranks exchange."""

    #: id that is equal for all processes that share a loopback interface
    loopback_of: str
    host: str
    #: the address that gloo derives from the host's name, or None if an interface is configured
    gloo: str | None
    #: the local address on the route to the store's host, or to any host; may be loopback on the store's host
    route: str

    @classmethod
    def find_own_addresses(cls, store: tuple[str, int] | None) -> NetworkAddresses:
        """Return the network addresses of this process.

        Args:
            store: address of the run's store, or None if it is a file.
        """
        gloo = None if list_gloo_interfaces() else address_of_name()
        return cls(_loopback(), socket.gethostname(), gloo, _route(store) or gloo or "127.0.0.1")

    def to_plain_values(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def list_gloo_interfaces() -> list[str]:
    """Return the interfaces in `GLOO_SOCKET_IFNAME`, parsed like in torch. If there are none, gloo uses the host's name."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [name for name in named.split(",") if name] if len(named) > 1 else []


def address_of_name() -> str:
    """Return the first address of the host's name to which a socket can be bound, else loopback. Gloo does the same."""
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


def explain_unreachable(networks: Sequence[NetworkAddresses]) -> str | None:
    """Return a sentence with the setting that lets ranks on several hosts connect, or None if we see no problem."""
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
    """Return whether an address is a loopback address of the host."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _loopback() -> str:
    """Return an id of the loopback interface.

    The id includes the network namespace, because containers of one host have the same boot id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # this is not Linux
        return socket.gethostname()


def _route(store: tuple[str, int] | None) -> str | None:
    """Return the source address of packets to the store's host. No packet is sent."""
    if store is None:
        return None
    try:
        shard_group, kind, protocol, _, address = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
        with socket.socket(shard_group, kind, protocol) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:
        return None
