"""Tensors that are counted in histograms: how ranks add them up, and the rows of their tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...capture.operand_stats import OperandStats, collect
from ...capture.operands import Operand
from ...core.keys import Key
from ...core.observation import Arrays, Lanes, Observation, SampledTables, SamplePlan
from ...core.table import Columns
from ...distributed import Ranks
from .measure import Measured, measure
from .sums import TensorSums

Stats = list[OperandStats]


class TensorObservation(Observation):
    """Tensors of one feature, by (layer, role)."""

    name = ""
    #: of its tensors
    roles: Collection[str] = ()

    def __init__(self, kinds: Mapping[Key, str], ranks: Ranks) -> None:
        """
        Args:
            kinds: of all tensors that ranks may have.
        """
        self._sums = TensorSums(kinds, ranks)

    @property
    def mixed(self) -> Sequence[Key]:
        """Tensors of the last sample that ranks have in different dtypes."""
        return self._sums.mixed

    def collect(self, mine: object, operands: Sequence[Operand]) -> Stats:
        """See `Observation`."""
        return collect([operand for operand in operands if operand.role in self.roles])

    def pack(self, plan: SamplePlan, found: Stats | None, expected: Collection[Key]) -> Arrays:
        """See `Observation`."""
        return self._sums.pack(plan, found or [], expected)

    def extremes(self, packed: Arrays) -> torch.Tensor:
        """See `Observation`."""
        return self._sums.extremes(packed)

    def sums(self, plan: SamplePlan, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `Observation`."""
        return self._sums.sums(plan, packed, extremes)

    def whole(self, plan: SamplePlan, sums: Lanes, extremes: torch.Tensor) -> Stats:
        """See `Observation`."""
        return self._sums.whole(plan, sums, extremes)

    def measure(self, sampled: SampledTables) -> Measured:
        """Return the metrics of whole tensors."""
        return measure(sampled.whole[self.name], sampled.what_if, sampled.chosen)


def put_in_use_first(columns: Columns) -> dict[str, list[Any]]:
    """Return rows of tensors as they are before those under other recipes, each in their order.

    Example:
        >>> put_in_use_first({"layer": ["a", "a", "b"], "scale_source": ["engine", "what-if", "engine"]})["layer"]
        ['a', 'b', 'a']
    """
    tried = [source == "what-if" for source in columns["scale_source"]]
    order = sorted(range(len(tried)), key=lambda i: tried[i])
    return {name: [values[i] for i in order] for name, values in columns.items()}


def join_rows(in_use: Columns, tried: Columns, own: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return rows of tensors as they are, with columns of their own, and then under other recipes, which lack those."""
    none = [None] * len(tried.get("layer", ()))
    return {name: [*values, *tried.get(name, none)] for name, values in {**in_use, **own}.items()}
