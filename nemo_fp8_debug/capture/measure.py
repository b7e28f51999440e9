"""From the operands of a sampled step to its figures."""

from __future__ import annotations

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
    in_use = [o.in_use for o in operands]
    measured = rows(moments, parts.sums(operands), _scales(operands, amax), [use.format for use in in_use])
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


def _limits(operands: Sequence[Operand]) -> torch.Tensor:
    return torch.tensor([o.in_use.format.max for o in operands], dtype=torch.float32)


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


def _scales(operands: Sequence[Operand], amax: torch.Tensor) -> torch.Tensor:
    """The scale of each operand, float32 [B]: the one in use, or what its rule makes of its amax."""
    limits = _limits(operands)
    scales = torch.full_like(amax, torch.nan)
    for rule in {o.in_use.scale for o in operands if isinstance(o.in_use.scale, CurrentScaling)}:
        mine = torch.tensor(
            [o.in_use.scale == rule if isinstance(o.in_use.scale, CurrentScaling) else False for o in operands]
        )
        scales = torch.where(mine, rule.scale(amax, limits), scales)
    for i, operand in enumerate(operands):
        if isinstance(operand.in_use.scale, torch.Tensor):
            scales[i] = operand.in_use.scale
    return scales


@dataclass(frozen=True)
class _Parts:
    """The sketches of all operands, each with the scale that it was cast with."""

    operands: list[Operand]
    sketches: list[Sketch]
    batch: SketchBatch
    scales: torch.Tensor
    owner: torch.Tensor  # int64: position of each part's operand

    @classmethod
    def of(cls, operands: Sequence[Operand], totals: SketchBatch) -> _Parts:
        parts = [(i, o, s) for i, o in enumerate(operands) for s in o.sketches]
        owners, sketches = [o for _, o, _ in parts], [s for _, _, s in parts]
        batch = totals if len(parts) == len(operands) else SketchBatch.of(sketches)
        owner = torch.tensor([i for i, _, _ in parts], dtype=torch.int64)
        return cls(owners, sketches, batch, _scales(owners, batch.amax()), owner)

    def sums(self, operands: Sequence[Operand]) -> QuantizationSums:
        """Sums of each operand, those of its parts added up; the direct ones where sketches cannot answer."""
        of_sketches = figures.quantization_sums(self.batch, self.scales, [o.in_use.format for o in self.operands])
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
            "recipe": [o.in_use.recipe for o in self.operands],
            "format": [o.in_use.format.name for o in self.operands],
            "dtype": [str(s.dtype).removeprefix("torch.") for s in self.sketches],
            "rounded": [s.rounded for s in self.sketches],
            "scale": [None if scale != scale else scale for scale in self.scales.double().tolist()],
            "bins": [bins.astype(np.uint16) for bins in occupied],
            "counts": [s.counts.cpu().numpy()[bins] for s, bins in zip(self.sketches, occupied, strict=True)],
        }
