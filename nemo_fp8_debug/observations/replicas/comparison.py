"""Compare copies of a tensor over ranks, within the two collectives of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.plain_arrays import Array
from ..operands.tensors import NONE

#: number of sums over ranks for each slot: how many ranks have a copy, how many of these have the largest and the smallest
#: checksum, and the sums of the numbers of these ranks
_COLUMNS = 5


class ReplicaReduction:
    """This rank's contribution to the two collectives."""

    def __init__(self, names: Sequence[str], slots: Mapping[str, int], rank: int) -> None:
        """
        Args:
            names: names of GEMMs, the same on all ranks.
            slots: largest number of parts, by kind of tensor.
        """
        self._rank, self._place = rank, dict[tuple[str, str], tuple[int, int]]()
        self.size = 0
        for name in names:
            for what, parts in slots.items():
                self._place[name, what] = self.size, parts
                self.size += parts

    def list_slot_checksums(self, found: Checksums) -> Array:
        """Return the slot and the checksum of each copy on this rank, int64 [n, 2]."""
        places = [(self._place.get(key), part, checksum) for key, (part, checksum) in found.items()]
        rows = [(place[0] + part, checksum) for place, part, checksum in places if place and part < place[1]]
        return np.array(rows, np.int64).reshape(-1, 2)

    def collect_maxima(self, slots: Array) -> torch.Tensor:
        """Return checksums and their negatives, int32 [2 slots].

        Their maxima over ranks show whether all copies are equal.
        """
        made = torch.full((2, self.size), NONE, dtype=torch.int32)
        for slot, checksum in slots.tolist():
            made[0, slot], made[1, slot] = checksum, -checksum
        return made.flatten()

    def collect_sums(self, slots: Array, extremes: torch.Tensor) -> torch.Tensor:
        """Return the numbers to be summed over ranks, float64 [slots, columns].

        Args:
            slots: result of `list_slot_checksums`.
            extremes: maxima over ranks.
        """
        largest, smallest = extremes.view(2, -1)
        rows = torch.zeros(self.size, _COLUMNS, dtype=torch.float64)
        for slot, checksum in slots.tolist():
            top, bottom = checksum == int(largest[slot]), -checksum == int(smallest[slot])
            rows[slot] = torch.tensor([1, top, bottom, top * self._rank, bottom * self._rank], dtype=torch.float64)
        return rows

    def unpack_all_ranks(self, added: torch.Tensor, extremes: torch.Tensor) -> dict[tuple[str, str], ReplicaResult]:
        """Return the comparison of all tensors on any rank, by (layer, what).

        Args:
            added: float64 [slots * columns], the sums over all ranks.
            extremes: maxima over ranks, as for `rows`.
        """
        table, largest = added.view(-1, _COLUMNS), extremes.view(2, -1)[0].tolist()
        found = {}
        for key, (first, count) in self._place.items():
            rows = table[first : first + count]
            if rows[:, 0].sum() > 0:
                found[key] = _wrong(rows[0], largest[first] > 0) if key[1] == "master" else _compared(rows)
        return found


def _wrong(row: torch.Tensor, any_is: bool) -> ReplicaResult:
    """Return the result of a comparison within each rank, whose checksum is 1 if the rank found a difference."""
    held, top, _, of_top, _ = row.tolist()
    apart = int(top) if any_is else 0
    return ReplicaResult(int(held), apart, int(of_top) if apart == 1 else None)


def _compared(rows: torch.Tensor) -> ReplicaResult:
    ranks = apart = 0
    alone: list[int] = []
    for held, top, bottom, of_top, of_bottom in rows.tolist():
        if held < 2:
            continue
        ranks += int(held)
        if top == held:
            continue  # all copies have the largest checksum
        most = max(top, bottom)
        apart += int(held - most)
        if held - most == 1 and held > 2:
            alone.append(int(of_bottom if bottom == 1 else of_top) if 1 in (top, bottom) else -1)
        else:
            alone += [-1, -1]
    known = len(alone) == 1 and alone[0] >= 0
    return ReplicaResult(ranks, apart, alone[0] if known else None)


#: the number of the part and its checksum, by (layer, what)
Checksums = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class ReplicaResult:
    """The comparison of a tensor's copies, over all its parts."""

    #: number of ranks with a copy that another rank also has
    ranks: int
    #: how many of these ranks differ from the majority
    apart: int
    #: the rank that differs, if it is the only one
    rank: int | None

    @property
    def outcome(self) -> str:
        """`equal`, `apart`, or `no copy` if each rank has its own part."""
        return "no copy" if not self.ranks else "apart" if self.apart else "equal"


def make_replica_columns(found: Mapping[tuple[str, str], ReplicaResult], kinds: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return a row for each tensor that ranks may have copies of.

    Args:
        found: comparisons by (layer, what).
        kinds: kinds of GEMMs, by name.
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
