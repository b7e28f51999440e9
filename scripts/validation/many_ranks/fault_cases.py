"""Faults of one of four ranks, and what is promised of a run that meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from network_cases import HOST_OF, WHOLE, WORLD

from nemo_fp8_debug.distributed import patience

__all__ = ["FAULTS", "HOST_OF", "INTERVAL", "WORLD", "broken", "wrong_with"]

INTERVAL = 5
#: where one rank lacks a GEMM, or has one more
SEVERAL = [["grad_output", 1, 0], ["grad_output", 3, 0], ["grad_output", 4, 0], ["input", 1, 0], ["input", 3, 0]]
SEVERAL += [["input", 4, 0], ["weight", 1, 0]]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, and what follows."""

    #: ranks that it can happen to, in turn
    victims: Sequence[int] = range(WORLD)
    #: sampling goes on: no rank is out of sync
    goes_on: bool = False
    #: seconds that it lasts, beside `lasts` of faults that outlast the limit; None: those
    lasts: float | None = None
    #: words of a warning that must be there, and once; None: as `speakers`
    says: str | None = None
    #: ranks of the rows of a record
    ranks: Sequence[Sequence[Any]] = tuple(WHOLE)

    def speakers(self, victim: int) -> list[int]:
        """Which ranks warn that ranks are out of sync: the lowest that is alive; in a partition, of either side."""
        return [] if self.goes_on else [min(set(range(WORLD)) - {victim})]


class AllAlive(Fault):
    """Ranks are out of sync, and all are there."""

    def speakers(self, victim: int) -> list[int]:
        return [0]


class Partition(Fault):
    """A host is cut off, and stays so."""

    def speakers(self, victim: int) -> list[int]:
        return [0, 2]


FULL = "cannot be written"
FAULTS: dict[str, Fault] = {
    "killed": Fault(),
    "stopped": Fault(),
    "delayed": Fault(goes_on=True, lasts=1.5),
    "cut off": Partition(victims=[2]),
    "disk full": Fault(victims=[0], goes_on=True, lasts=1.5, says=FULL),
    "restarted": Fault(victims=[1, 2, 3]),
    "other batch": Fault(goes_on=True, lasts=0.0),
    "other shapes": Fault(goes_on=True, lasts=0.0),
    "other GEMMs": Fault(goes_on=True, lasts=0.0, ranks=tuple(SEVERAL)),
    "other dtype": Fault(goes_on=True, lasts=0.0, says="dtype differs between ranks", ranks=tuple(WHOLE[2:])),
    "other steps": AllAlive(lasts=0.0),
}


def broken(found: dict[str, Any]) -> list[str]:
    """Promises that results do not keep, in words."""
    return [
        f"{name}, {i}: {what}"
        for name, runs in found["faults"].items()
        for i, run in enumerate(runs)
        for what in wrong_with(run, FAULTS[name], found["limit_s"])
    ]


def wrong_with(run: dict[str, Any], fault: Fault, limit: float) -> list[str]:
    """
    Args:
        limit: seconds that training may wait for other ranks, in all, once they are out of sync; what the scheduler took
            is not in it.
    """
    victim, wrong = run["victim"], []
    for rank, status in run["statuses"].items():
        if status != 0:
            wrong.append(f"rank {rank} ended with {status}")
    for rank, of in run["ranks"].items():
        if not of["identical"]:
            wrong.append(f"losses of rank {rank} are not as without a monitor")
        if int(rank) != victim and of["net_s"] > (patience.LONGEST if fault.goes_on else limit):
            wrong.append(f"rank {rank} waited {of['net_s']} s")
    speakers = [int(rank) for rank, of in run["ranks"].items() for message in of["warnings"] if "out of sync" in message]
    if sorted(speakers) != fault.speakers(victim):
        wrong.append(f"ranks {speakers} warned")
    if fault.says:
        said = [message for of in run["ranks"].values() for message in of["warnings"] if fault.says in message]
        wrong += [] if len(said) == 1 else [f"{len(said)} warnings say {fault.says!r}"]
    return wrong + wrong_with_record(run, fault)


def wrong_with_record(run: dict[str, Any], fault: Fault) -> list[str]:
    """A sample of each step that was due: all of them, or those before the fault but for what was in flight."""
    until = run["last_step"] if fault.goes_on else run["failed_at_step"] - 2 * INTERVAL
    wrong, due = [], set(range(0, until, INTERVAL))
    if run["recorded"]["problem"]:
        wrong.append(f"the record cannot be read: {run['recorded']['problem']}")
    if lost := due - set(run["recorded"]["steps"]):
        wrong.append(f"no sample of steps {sorted(lost)}")
    if run["recorded"]["ranks"] != [list(row) for row in fault.ranks] and due:
        wrong.append(f"rows are made of {run['recorded']['ranks']}")
    return wrong
