"""What can happen to the hosts of a run, and what is promised of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORLD = 4
#: host of each rank; the store is on the first one, or on a host of its own
HOST_OF = (0, 0, 1, 1)
STORE_ALONE = 2
#: ranks in a row of the record, by role; all have the same W, and the first counts it
WHOLE = [["grad_output", 4, 0], ["input", 4, 0], ["weight", 1, 0]]


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
    #: ranks that warn; None: one at the most, as not every rank comes to know before the run ends
    speakers: Sequence[int] | None = (0,)

    @property
    def stopped(self) -> list[int]:
        """Ranks that are stopped; -1 is the process of the store."""
        ranks = [r for r in range(WORLD) if HOST_OF[r] in self.frozen_hosts or r in self.frozen_ranks]
        return ranks + ([-1] if STORE_ALONE in self.frozen_hosts else [])


CASES = {
    "no fault": Case(speakers=()),
    "interface not named": Case(named=False, speakers=None),
    "store's host frozen": Case(frozen_hosts=[0], speakers=[2]),
    "store's process frozen": Case(frozen_hosts=[STORE_ALONE], store_alone=True),
    "store's host cut off": Case(cut=[STORE_ALONE], store_alone=True),
    "partition": Case(cut=[1], speakers=[0, 2]),
    "partition, with triggers": Case(cut=[1], triggers=True, speakers=[0, 2]),
    "rank frozen": Case(frozen_ranks=[3]),
    "rank frozen, and the run ends": Case(frozen_ranks=[3], closes=True),
    "store's host frozen, and the run ends": Case(frozen_hosts=[0], closes=True, speakers=None),
}


def broken(found: dict[str, Any]) -> list[str]:
    """Promises that results do not keep, in words; the monitor's own work on a busy machine is not what is promised."""
    wrong = []
    for name, result in found["cases"].items():
        case, ranks = CASES[name], result["ranks"]
        said = [(r["rank"], w) for r in ranks for w in r["warnings"] if "out of sync" in w or "cannot be connected" in w]
        speakers = [rank for rank, _ in said]
        if len(speakers) > 1 if case.speakers is None else speakers != list(case.speakers):
            wrong.append(f"{name}: ranks {speakers} warned")
        if not case.named and not any("set GLOO_SOCKET_IFNAME" in warning for _, warning in said):
            wrong.append(f"{name}: no rank says what to set")
        if case.named and result["recorded"]["ranks"] != WHOLE:
            wrong.append(f"{name}: rows are made of {result['recorded']['ranks']}")
        for rank in ranks:
            if not rank["losses_identical"] or rank["exit"]:
                wrong.append(f"{name}: rank {rank['rank']} is not as without a monitor")
            if rank["rank"] not in case.stopped and rank["held_up_s"] > found["limit_s"] + found["work_s"]:
                wrong.append(f"{name}: rank {rank['rank']} was held up for {rank['held_up_s']} s")
    return wrong
