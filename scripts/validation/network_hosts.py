"""Hosts on one machine: network namespaces with an address each, that a bridge connects. Takes root and `ip` (iproute2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: name of the network interface on each host
INTERFACE = "fp8net"
CLONE_NEWNET = 0x40000000


class Hosts:
    """Namespaces, and one more for the bridge; the machine's own network has no part in it."""

    def __init__(self, count: int) -> None:
        self._names = [f"fp8-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"fp8-{os.getpid()}-switch"
        self._owner = os.getpid()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        ip("netns", "add", self._switch)
        self._on_switch("link", "add", "bridge", "type", "bridge")
        self._on_switch("link", "set", "bridge", "up")
        for i, name in enumerate(self._names):
            ip("netns", "add", name)
            self._on_switch("link", "add", f"port{i}", "type", "veth", "peer", "name", INTERFACE, "netns", name)
            self._on_switch("link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", name, "link", "set", interface, "up")

    def _on_switch(self, *command: str) -> None:
        ip("-n", self._switch, *command)

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.7.{host + 1}"

    def enter(self, host: int) -> None:
        """Let this process be on a host from now on."""
        with Path(f"/var/run/netns/{self._names[host]}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self, host: int) -> None:
        """Let no packet of a host pass any longer."""
        self._on_switch("link", "set", f"port{host}", "down")

    def close(self) -> None:
        if os.getpid() != self._owner:  # a process that was forked meanwhile ends
            return
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


def possible() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    try:
        made = Hosts(1)
    except FileNotFoundError:
        return "no `ip` here; Debian's package iproute2 has it"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    made.close()
    return None


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    made = Hosts(count)
    try:
        yield made
    finally:
        made.close()
