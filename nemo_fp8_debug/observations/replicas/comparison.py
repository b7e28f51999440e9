"""Whether copies that ranks hold of the same tensor are equal, within the two collectives of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.plain_arrays import Array
from ..operands.tensors import NONE

#: of a slot, added up over ranks: that hold it, whose checksum is the largest, the smallest, and the sums of both ranks
_COLUMNS = 5


class ReplicaComparison:
    """What a rank adds to the two collectives."""

    def __init__(self, names: Sequence[str], slots: Mapping[str, int], rank: int) -> None:
        """
        Args:
            names: of GEMMs, the same on all ranks.
            slots: how many parts there can be, by what is compared.
        """
        self._rank, self._place = rank, dict[tuple[str, str], tuple[int, int]]()
        self.size = 0
        for name in names:
            for what, parts in slots.items():
                self._place[name, what] = self.size, parts
                self.size += parts

    def slots(self, found: Checksums) -> Array:
        """int64 [n, 2]: the slot of each copy that this rank has, and its checksum."""
        places = [(self._place.get(key), part, checksum) for key, (part, checksum) in found.items()]
        rows = [(place[0] + part, checksum) for place, part, checksum in places if place and part < place[1]]
        return np.array(rows, np.int64).reshape(-1, 2)

    def extremes(self, slots: Array) -> torch.Tensor:
        """int32 [2 slots]: checksums and their negatives, whose maxima tell whether all are equal."""
        made = torch.full((2, self.size), NONE, dtype=torch.int32)
        for slot, checksum in slots.tolist():
            made[0, slot], made[1, slot] = checksum, -checksum
        return made.flatten()

    def rows(self, slots: Array, extremes: torch.Tensor) -> torch.Tensor:
        """float64 [slots, columns], which add up over ranks.

        Args:
            slots: as of `slots`.
            extremes: their maxima over ranks.
        """
        largest, smallest = extremes.view(2, -1)
        rows = torch.zeros(self.size, _COLUMNS, dtype=torch.float64)
        for slot, checksum in slots.tolist():
            top, bottom = checksum == int(largest[slot]), -checksum == int(smallest[slot])
            rows[slot] = torch.tensor([1, top, bottom, top * self._rank, bottom * self._rank], dtype=torch.float64)
        return rows

    def of_all(self, added: torch.Tensor, extremes: torch.Tensor) -> dict[tuple[str, str], Compared]:
        """By (layer, what), of all that any rank has.

        Args:
            added: float64 [slots * columns], over all ranks.
            extremes: as of `rows`.
        """
        table, largest = added.view(-1, _COLUMNS), extremes.view(2, -1)[0].tolist()
        found = {}
        for key, (first, count) in self._place.items():
            rows = table[first : first + count]
            if rows[:, 0].sum() > 0:
                found[key] = _wrong(rows[0], largest[first] > 0) if key[1] == "master" else _compared(rows)
        return found


def _wrong(row: torch.Tensor, any_is: bool) -> Compared:
    """Of what each rank compares for itself, which gives 1 where it is wrong."""
    held, top, _, of_top, _ = row.tolist()
    apart = int(top) if any_is else 0
    return Compared(int(held), apart, int(of_top) if apart == 1 else None)


def _compared(rows: torch.Tensor) -> Compared:
    ranks = apart = 0
    alone: list[int] = []
    for held, top, bottom, of_top, of_bottom in rows.tolist():
        if held < 2:
            continue
        ranks += int(held)
        if top == held:
            continue  # all have the largest
        most = max(top, bottom)
        apart += int(held - most)
        if held - most == 1 and held > 2:
            alone.append(int(of_bottom if bottom == 1 else of_top) if 1 in (top, bottom) else -1)
        else:
            alone += [-1, -1]
    known = len(alone) == 1 and alone[0] >= 0
    return Compared(ranks, apart, alone[0] if known else None)


#: by (layer, what): the part that a rank has a copy of, and the checksum of it
Checksums = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class Compared:
    """The copies of one tensor, of all its parts."""

    #: ranks that hold a copy which another rank holds too
    ranks: int
    #: of those, ranks whose copy is not that of most
    apart: int
    #: the only rank that is apart; None: there is none, or several are
    rank: int | None

    @property
    def outcome(self) -> str:
        """`equal`, `apart`, or `no copy`: each rank has a part of its own."""
        return "no copy" if not self.ranks else "apart" if self.apart else "equal"


def replica_columns(found: Mapping[tuple[str, str], Compared], kinds: Mapping[str, str]) -> dict[str, list[Any]]:
    """A row a tensor that ranks may have copies of.

    Args:
        found: by (layer, what).
        kinds: of GEMMs, by name.
    """
    if not found:
        return {}
    keys, values = list(found), list(found.values())
    return {
        "layer": [layer for layer, _ in keys],
        "gemm": [kinds[layer] for layer, _ in keys],
        "what": [what for _, what in keys],
        "outcome": [one.outcome for one in values],
        "ranks": [one.ranks for one in values],
        "ranks_apart": [one.apart for one in values],
        "rank": [one.rank for one in values],
    }
