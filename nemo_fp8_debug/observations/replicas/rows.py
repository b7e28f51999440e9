"""What was found of copies that ranks hold of the same tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
