"""From the operands of a sampled step to its figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..numerics import figures
from ..numerics.figures import Moments, QuantizationSums
from ..numerics.history import EmulatedScales
from ..numerics.rows import rows, weigh
from ..numerics.scaling import CurrentScaling
from ..numerics.sketch import Sketch, SketchBatch
from .hosts.base import ScaleInUse
from .operands import Operand

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Measured:
    """What a sample records of its operands."""

    #: columns of figures
    figures: Columns
    #: columns of sketches
    sketches: Columns
    #: columns of figures under recipes that were not in use
    what_if: Columns
    #: float32 [B], of each operand
    amax: torch.Tensor


def measure(operands: Sequence[Operand], others: Sequence[EmulatedScales] = ()) -> Measured:
    """All figures of operands that were seen at least once.

    Args:
        others: recipes to weigh as well; float32 operands, whose sketches are rounded, are left out under delayed and
            current scaling.
    """
    totals = SketchBatch.of([o.total for o in operands])
    moments = _moments(operands, totals)
    amax = moments.amax.float()
    parts = _Parts.of(operands, totals)
    in_use = [o.casts[0] for o in operands]
    measured = rows(moments, parts.sums(operands), parts.smallest(len(operands)), [use.format for use in in_use])
    described: Columns = {
        "recipe": [use.recipe for use in in_use],
        "scale_source": [use.source for use in in_use],
        "nonfinite_order": [o.nonfinite_order for o in operands],
    }
    weighed = _what_if(operands, moments, others)
    return Measured(_about(operands) | described | measured, parts.columns(), weighed, amax)


def _about(operands: Sequence[Operand]) -> Columns:
    return {
        "layer": [o.gemm.name for o in operands],
        "gemm": [o.gemm.kind for o in operands],
        "role": [o.role for o in operands],
        "dtype": [str(o.dtype).removeprefix("torch.") for o in operands],
        "calls": [o.calls for o in operands],
    }


def _what_if(operands: Sequence[Operand], moments: Moments, others: Sequence[EmulatedScales]) -> Columns:
    tables = _weighed_by_sketches([o for o in operands if not o.moments], [o for o in others if not o.recipe.in_blocks])
    tables += _weighed_directly(operands, moments, others)
    return {name: [value for table in tables for value in table[name]] for name in tables[0]} if tables else {}


def _weighed_by_sketches(operands: Sequence[Operand], others: Sequence[EmulatedScales]) -> list[Columns]:
    if not operands or not others:
        return []
    totals = SketchBatch.of([o.total for o in operands])
    moments, parts = figures.moments(totals), _Parts.of(operands, totals)
    keys = [o.key for o in parts.operands]
    tables = []
    for other in others:
        measured = weigh(moments, parts.batch, parts.owner, other.of(keys, parts.batch.amax()), other.formats(keys))
        tables.append(_about(operands) | _named(other, len(operands)) | measured)
        other.observe([o.key for o in operands], moments.amax.float())
    return tables


def _weighed_directly(operands: Sequence[Operand], moments: Moments, others: Sequence[EmulatedScales]) -> list[Columns]:
    tables = []
    for other in others:
        name = other.recipe.name
        if chosen := [i for i, o in enumerate(operands) if name in o.weighed]:
            mine, rest = [operands[i] for i in chosen], Moments.concat([moments.row(i) for i in chosen])
            keys = [o.key for o in mine]
            sums = QuantizationSums.concat([_total(o.weighed[name]) for o in mine])
            measured = rows(rest, sums, other.of(keys, rest.amax.float()), other.formats(keys))
            tables.append(_about(mine) | _named(other, len(mine)) | measured)
    return tables


def _named(other: EmulatedScales, n: int) -> Columns:
    return {"recipe": [other.recipe.name] * n, "scale_source": ["what-if"] * n}


def _total(parts: Sequence[QuantizationSums]) -> QuantizationSums:
    return QuantizationSums.concat([part.cpu() for part in parts]).total()


def _moments(operands: Sequence[Operand], totals: SketchBatch) -> Moments:
    """Moments of each operand: those of its sketch, or the direct ones where the sketch is rounded."""
    of_sketches = figures.moments(totals)
    if not any(o.moments for o in operands):
        return of_sketches
    parts = []
    for i, operand in enumerate(operands):
        row = of_sketches.row(i)
        if operand.moments:
            row = figures.merge(Moments.concat(operand.moments).cpu()).with_median(row.median)
        parts.append(row)
    return Moments.concat(parts)


def _scales(uses: Sequence[ScaleInUse], amax: torch.Tensor) -> torch.Tensor:
    """The scale of each cast, float32 [B]: the one in use, or what its rule makes of the amax."""
    limits = torch.tensor([use.format.max for use in uses], dtype=torch.float32)
    scales = torch.full_like(amax, torch.nan)
    for rule in {use.scale for use in uses if isinstance(use.scale, CurrentScaling)}:
        mine = torch.tensor([isinstance(use.scale, CurrentScaling) and use.scale == rule for use in uses])
        scales = torch.where(mine, rule.scale(amax, limits), scales)
    for i, use in enumerate(uses):
        if isinstance(use.scale, torch.Tensor):
            scales[i] = use.scale
    return scales


@dataclass(frozen=True)
class _Parts:
    """The sketches of all operands, each with the scale that it was cast with."""

    operands: list[Operand]
    casts: list[ScaleInUse]
    sketches: list[Sketch]
    batch: SketchBatch
    scales: torch.Tensor
    owner: torch.Tensor  # int64: position of each part's operand

    @classmethod
    def of(cls, operands: Sequence[Operand], totals: SketchBatch) -> _Parts:
        parts = [(i, o, u, s) for i, o in enumerate(operands) for u, s in zip(o.casts, o.sketches, strict=True)]
        owners, casts, sketches = [o for _, o, _, _ in parts], [u for *_, u, _ in parts], [s for *_, s in parts]
        batch = totals if len(parts) == len(operands) else SketchBatch.of(sketches)
        owner = torch.tensor([i for i, *_ in parts], dtype=torch.int64)
        amax = batch.amax()
        exact = [o.moments if len(o.moments) == len(o.sketches) else [None] * len(o.sketches) for o in operands]
        for i, direct in enumerate(itertools.chain.from_iterable(exact)):
            if direct is not None:  # the sketch of a float32 tensor is rounded
                amax[i] = direct.amax.float()
        return cls(owners, casts, sketches, batch, _scales(casts, amax), owner)

    def smallest(self, n: int) -> torch.Tensor:
        """The smallest scale of each of n operands, float32."""
        return torch.full((n,), torch.inf, dtype=torch.float32).scatter_reduce_(0, self.owner, self.scales, "amin")

    def sums(self, operands: Sequence[Operand]) -> QuantizationSums:
        """Sums of each operand, those of its parts added up; the direct ones where sketches cannot answer."""
        of_sketches = figures.quantization_sums(self.batch, self.scales, [use.format for use in self.casts])
        folded = of_sketches.fold(self.owner, len(operands))
        if not any(o.sums for o in operands):
            return folded
        return QuantizationSums.concat([_total(o.sums) if o.sums else folded.row(i) for i, o in enumerate(operands)])

    def columns(self) -> Columns:
        """The sketches as a table; bins of infinity and NaN included, so that a sketch is whole."""
        occupied = [s.counts.cpu().numpy().nonzero()[0] for s in self.sketches]
        return {
            "layer": [o.gemm.name for o in self.operands],
            "role": [o.role for o in self.operands],
            "recipe": [use.recipe for use in self.casts],
            "format": [use.format.name for use in self.casts],
            "dtype": [str(s.dtype).removeprefix("torch.") for s in self.sketches],
            "rounded": [s.rounded for s in self.sketches],
            "scale": [None if scale != scale else scale for scale in self.scales.double().tolist()],
            "bins": [bins.astype(np.uint16) for bins in occupied],
            "counts": [s.counts.cpu().numpy()[bins] for s, bins in zip(self.sketches, occupied, strict=True)],
        }
