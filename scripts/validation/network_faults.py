"""Runs over hosts whose network or processes fail: how long training is held up, who says so, and whether losses stay the same.

    python scripts/validation/network_faults.py --output results.json

Hosts are network namespaces that a bridge connects; it takes root. Each rank trains a model of its own, so that training itself
waits for no other host. `--limit` is what the monitor promises, 60 s; a fault lasts longer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.distributed import patience
from nemo_fp8_debug.kernels import sketch

WORLD, INTERVAL, PORT, INTERFACE = 4, 5, 29600, "fp8net"
#: seconds of a step, and those after which a call of the monitor counts as a wait
STEP, A_WAIT = 0.05, 0.5
#: host of each rank; the store is on the first one, or on a host of its own
HOST_OF = (0, 0, 1, 1)
STORE_ALONE = 2
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Case:
    """What happens to a run."""

    #: hosts whose processes are stopped, and single ranks
    frozen_hosts: Sequence[int] = ()
    frozen_ranks: Sequence[int] = ()
    #: hosts that are cut off, and stay so
    cut: Sequence[int] = ()
    store_alone: bool = False
    #: with triggers, ranks add up the loss at every step
    triggers: bool = False
    #: the run ends while the fault lasts
    closes: bool = False
    #: gloo finds the network interface that is named
    named: bool = True

    @property
    def spared(self) -> list[int]:
        """Ranks that run all the time."""
        return [r for r in range(WORLD) if HOST_OF[r] not in self.frozen_hosts and r not in self.frozen_ranks]


CASES = {
    "no fault": Case(),
    "interface not named": Case(named=False),
    "store's host frozen": Case(frozen_hosts=[0]),
    "store's process frozen": Case(frozen_hosts=[STORE_ALONE], store_alone=True),
    "store's host cut off": Case(cut=[STORE_ALONE], store_alone=True),
    "partition": Case(cut=[1]),
    "partition, with triggers": Case(cut=[1], triggers=True),
    "rank frozen": Case(frozen_ranks=[3]),
    "rank frozen, and the run ends": Case(frozen_ranks=[3], closes=True),
    "store's host frozen, and the run ends": Case(frozen_hosts=[0], closes=True),
}


class Hosts:
    """Network namespaces with an address each, connected by a bridge in one more."""

    def __init__(self, count: int) -> None:
        self._names = [f"fp8-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"fp8-{os.getpid()}-switch"
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
        """Be on a host from now on."""
        with Path(f"/var/run/netns/{self._names[host]}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self, host: int) -> None:
        """Let no packet of it pass any longer."""
        self._on_switch("link", "set", f"port{host}", "down")

    def close(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    made = Hosts(count)
    try:
        yield made
    finally:
        made.close()


class Board:
    """What processes of a run show each other: memory that they share."""

    def __init__(self) -> None:
        self.steps = torch.zeros(WORLD, dtype=torch.int64).share_memory_()
        self.flags = torch.zeros(2, dtype=torch.int64).share_memory_()

    @property
    def over(self) -> bool:
        return bool(self.flags[0])

    def end(self) -> None:
        self.flags[0] = 1


def losses_of(rank: int, steps: int | None, around: Callable[[int, Callable[[], float]], float | None]) -> list[float]:
    """Train; `around` is given each step and does it, or ends the run."""
    torch.manual_seed(rank)
    model = around_model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, losses = torch.Generator().manual_seed(rank), []
    around.model = around_model  # type: ignore[attr-defined]

    def train() -> float:
        x = torch.randn(8, 16, generator=data).bfloat16()
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    while steps is None or len(losses) < steps:
        loss = around(len(losses), train)
        if loss is None:
            break
        losses.append(loss)
    return losses
