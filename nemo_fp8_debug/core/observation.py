"""What one feature observes, for the length of a run: how ranks add it up, and the rows of its tables.

Ranks that hold parts of the same tensors add up all that they have observed in two collectives: a maximum of integers and,
knowing that, a sum of float64. Each feature has a part in both.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .keys import Key
from .plain_arrays import Array
from .table import Columns

Arrays = Mapping[str, Array]
#: parts of the sum by lane: lower lanes lie first in it, and in a lane earlier features do. On more than two ranks, rounding
#: depends on that place. So lanes keep their numbers, and records stay equal to the last bit
Lanes = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class SamplePlan:
    """What all ranks have to agree on before they add up a sample."""

    step: int
    #: names of recipes that are tried
    what_if: Sequence[str] = ()
    #: whether copies that another product multiplies are measured too
    copies: bool = False
    #: whether scales of blocks are counted
    block_scales: bool = False

    def checksum(self) -> int:
        """Return 31 bits."""
        return zlib.crc32(json.dumps([self.step, *self.what_if, self.copies, self.block_scales]).encode()) >> 1


class Observation:
    """One feature on this rank. What it finds and what ranks have together is its own matter."""

    #: of its folder
    name = ""

    def observe(self, step: Any) -> Any:
        """Return what looks at a sampled step that opens, as `monitor.open_step` has both."""
        raise NotImplementedError

    def collect(self, mine: Any, operands: Sequence[Any]) -> Any:
        """Return what this rank found in a sampled step, once that is in host memory.

        Args:
            mine: what looked at the step, as `observe` returned it; None: that broke off.
            operands: tensors of all features that were counted.
        """
        raise NotImplementedError

    def pack(self, plan: SamplePlan, found: Any, expected: Collection[Key]) -> Arrays:
        """Return what this rank found as plain arrays; of one that found nothing too.

        Args:
            found: in a sampled step; None: nothing could be collected.
            expected: operands that this rank was to see.
        """
        raise NotImplementedError

    def extremes(self, packed: Arrays) -> torch.Tensor:
        """Return int32 [n], whose maximum over ranks is taken; n is the same on all. By default there are none."""
        return torch.zeros(0, dtype=torch.int32)

    def sums(self, plan: SamplePlan, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """Return what is added up over ranks, float64 [m] by lane; each m follows from the extremes.

        Args:
            extremes: their maximum over all ranks.
        """
        raise NotImplementedError

    def whole(self, plan: SamplePlan, sums: Lanes, extremes: torch.Tensor) -> Any:
        """Return what all ranks have found together; asked on the first of them."""
        raise NotImplementedError

    def alone(self, found: Any) -> Any:
        """Return the same where no other rank has parts. By default that is what this rank found."""
        return found

    def rows(self, sampled: SampledTables) -> Mapping[str, Columns]:
        """Return the rows of its tables."""
        raise NotImplementedError

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> Mapping[str, Columns]:
        """Return tables that need all rows of a model, or scalars of the step; asked on the rank that writes."""
        return {}


@dataclass(frozen=True)
class SampledTables:
    """What rows are made of: all that was observed in one step, on all ranks that hold parts of it."""

    step: int
    #: by feature
    whole: Mapping[str, Any]
    #: kinds of GEMMs and attentions, by name
    kinds: Mapping[str, str]
    #: names of those that were looked at, on whichever rank
    chosen: Collection[str]
    #: recipes that are tried, with their histories
    what_if: Sequence[Any] = ()
    #: norms of operands, and how they were cast, by (layer, role): left by operands for features that come later
    norms: dict[Key, float] = field(default_factory=dict)
    casts: dict[Key, Any] = field(default_factory=dict)
