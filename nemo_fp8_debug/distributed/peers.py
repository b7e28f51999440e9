"""Choose the rank that warns if ranks are out of sync: the lowest rank that is alive.

This works without the store, because the store's host may be gone. Each rank has a UDP port. If other ranks do not answer in
a sample, a rank sends them a message and waits a moment. If a lower rank is alive, this rank answers, and warns for all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import patience
from .networks import NetworkAddresses, is_loopback

#: how often a message is sent to each rank, because packets may be lost
TIMES = 4
#: we ask this many of the lowest ranks, and the lowest rank on each of this many hosts
LOWEST = 8


class WarningElection:
    """The ports of this rank and of the ranks that take precedence for warnings."""

    def __init__(self, rank: int, network: NetworkAddresses) -> None:
        """
        Raises:
            OSError: a port cannot be opened here.
        """
        family = socket.AF_INET6 if ":" in network.route else socket.AF_INET
        self._rank, self._network = rank, network
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self._addresses: dict[int, tuple[str, int]] = {}
        self._token = ""
        self._changed = threading.Condition()
        self._alive: set[int] = set()
        self._said = False

    @staticmethod
    def choose_contact_ranks(networks: Sequence[NetworkAddresses]) -> list[int]:
        """Return the ranks that other ranks ask."""
        first = {network.loopback_of: rank for rank, network in reversed(list(enumerate(networks)))}
        return sorted({*range(min(LOWEST, len(networks))), *sorted(first.values())[:LOWEST]})

    def exchange_addresses(
        self, token: str, peers: Mapping[int, tuple[NetworkAddresses, int]], store_host: str | None
    ) -> None:
        """Store the addresses of other ranks.

        Args:
            token: identifies messages of this run.
            peers: network and port of each rank that is asked.
            store_host: address of the store's host. Needed because a rank on that host may know only its loopback address.
        """
        self._token = token
        for rank, (network, port) in peers.items():
            there = network.route
            if is_loopback(there) and network.loopback_of != self._network.loopback_of and store_host:
                there = store_host
            if rank != self._rank:
                self._addresses[rank] = there, port

    def answer_messages(self, told: Callable[[int, str], None]) -> None:
        """Start to answer messages.

        Args:
            told: a method that is called with a step and a reason when another rank detects that ranks are out of sync.
        """
        weak = weakref.WeakMethod(told)  # do not keep the method's owner alive, because it may be dropped without `close`
        threading.Thread(target=self._answer, args=(weak,), name="nemo_fp8_debug peers", daemon=True).start()

    def elect_warner(self, step: int, why: str) -> bool:
        """Inform other ranks, and wait for an answer from a lower rank. Return whether this rank must warn."""
        for _ in range(TIMES):
            self._send("out of sync", self._addresses, step=step, why=why)
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._said or bool(self._alive), patience.compute_background_wait() / TIMES
                ):
                    return False
        return True

    def note_warning(self) -> None:
        """Note that a warning was printed, so that ranks that ask later do not warn."""
        self._said = True
        self._send("said", self._addresses)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            own = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
            self._socket.sendto(self._message("close"), (own, self.port))

    def _message(self, kind: str, **values: Any) -> bytes:
        return json.dumps({"token": self._token, "rank": self._rank, "kind": kind, **values}).encode()

    def _send(self, kind: str, ranks: Iterable[int], **values: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._socket.sendto(self._message(kind, **values), self._addresses[rank])

    def _answer(self, weak: Callable[[], Callable[[int, str], None] | None]) -> None:
        while True:
            try:
                data, address = self._socket.recvfrom(4096)
                message = json.loads(data)
                if message["token"] != self._token:
                    continue
                kind, rank = message["kind"], int(message["rank"])
            except (ValueError, KeyError, TypeError, OSError, RecursionError):
                continue
            if kind == "close":
                self._socket.close()
                return
            with self._changed:
                self._alive |= {rank} if rank < self._rank and kind != "said" else set()
                self._said |= kind == "said"
                self._changed.notify_all()
            if kind == "out of sync":
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._message("here"), address)
                if told := weak():
                    told(message["step"], message["why"])
