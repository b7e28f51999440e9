"""Observe one feature during a run, combine its results over ranks, and make the rows of its tables.

Ranks with parts of the same tensors combine a sample in two collectives: a maximum of integers, and then a sum of float64
values. Each feature contributes values to both.
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
#: parts of the sum, by lane. Lower lanes come first in the sum. Within a lane, earlier features come first. On more than two
#: ranks, rounding depends on this order. So the numbers of lanes must not change, if records are to stay bitwise equal
Lanes = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class AgreedSampleSettings:
    """The settings that all ranks must agree on before they combine a sample."""

    step: int
    #: names of the what-if recipes
    what_if: Sequence[str] = ()
    #: whether to measure the copies of operands that are cast for other products
    copies: bool = False
    #: whether to count scales of blocks
    block_scales: bool = False

    def checksum(self) -> int:
        """Return a checksum of 31 bits."""
        return zlib.crc32(json.dumps([self.step, *self.what_if, self.copies, self.block_scales]).encode()) >> 1


class FeatureObservation:
    """Observes one feature on this rank. Each feature chooses the types of its results."""

    #: name of the feature's folder
    name = ""

    def start_observer(self, step: Any) -> Any:
        """Return an observer for a sampled step that begins, see `monitor.open_step`."""
        raise NotImplementedError

    def collect_results(self, mine: Any, operands: Sequence[Any]) -> Any:
        """Return this rank's results of a sampled step, after the data reached host memory.

        Args:
            mine: the observer that `start_observer` returned, or None if it failed.
            operands: tensors that any feature counted.
        """
        raise NotImplementedError

    def pack_results(self, plan: AgreedSampleSettings, found: Any, expected: Collection[Key]) -> Arrays:
        """Return this rank's results as plain arrays, even if there are no results.

        Args:
            found: what `collect_results` returned, or None if nothing could be collected.
            expected: operands that this rank should have seen.
        """
        raise NotImplementedError

    def collect_maxima(self, packed: Arrays) -> torch.Tensor:
        """Return numbers to be maximized over ranks, int32 [n]. n is the same on all ranks, and 0 by default."""
        return torch.zeros(0, dtype=torch.int32)

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """Return numbers to be summed over ranks, by lane, float64 [m]. Each m follows from the extremes.

        Args:
            extremes: maximum over all ranks of the result of `collect_maxima`.
        """
        raise NotImplementedError

    def combine_all_ranks(self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor) -> Any:
        """Return the combined results of all ranks. Only the first rank of the shard group calls this."""
        raise NotImplementedError

    def compute_single_rank_result(self, found: Any) -> Any:
        """Return the results if no other rank has parts of the tensors. By default, these are this rank's results."""
        return found

    def make_table_rows(self, sampled: CombinedObservations) -> Mapping[str, Columns]:
        """Return the rows of this feature's tables."""
        raise NotImplementedError

    def finish_tables(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> Mapping[str, Columns]:
        """Return tables that need all rows of a model, or scalars of the step. Only the rank with the record calls this."""
        return {}


@dataclass(frozen=True)
class CombinedObservations:
    """The input of `FeatureObservation.make_table_rows`: the results of one step on all ranks that have parts of the same
    tensors."""

    step: int
    #: results of all ranks, by feature
    whole: Mapping[str, Any]
    #: kinds of GEMMs and attentions by the name of their module
    kinds: Mapping[str, str]
    #: names of the modules that any rank observed
    chosen: Collection[str]
    #: what-if recipes, with their amax histories
    what_if: Sequence[Any] = ()
    #: norms and casts of operands, by (layer, role); the feature `operands` fills these in for later features
    norms: dict[Key, float] = field(default_factory=dict)
    casts: dict[Key, Any] = field(default_factory=dict)
