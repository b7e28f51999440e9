"""From the shards of a sampled step to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .numerics import figures
from .numerics.figures import Moments, QuantizationSums
from .numerics.formats import FORMATS
from .numerics.history import EmulatedScales
from .numerics.rows import rows, weigh
from .numerics.scaling import CurrentScaling, parse_recipe
from .numerics.sketch import SketchBatch
from .shards import Shard

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

    def and_those_of(self, others: Sequence[Measured]) -> Measured:
        """The rows of all, as of the stages of a pipeline."""

        def joined(parts: Sequence[Columns]) -> Columns:
            filled = [part for part in parts if part]
            return {name: [v for part in filled for v in part[name]] for name in filled[0]} if filled else {}

        every = [self, *others]
        return Measured(
            joined([m.figures for m in every]), joined([m.sketches for m in every]), joined([m.what_if for m in every])
        )


def measure(shards: Sequence[Shard], others: Sequence[EmulatedScales] = ()) -> Measured:
    """All figures of operands.

    Args:
        others: recipes to weigh as well; float32 operands, whose sketches are rounded, are left out under delayed and
            current scaling.
    """
    totals = SketchBatch.of([s.sketch for s in shards])
    moments = _moments(shards, totals)
    formats = [FORMATS[s.cast.format] for s in shards]
    scale, sums = _in_use(shards, totals, moments)
    described: Columns = {
        "recipe": [s.cast.recipe for s in shards],
        "scale_source": [s.cast.source for s in shards],
        "nonfinite_order": [s.nonfinite_order for s in shards],
    }
    measured = _about(shards) | described | rows(moments, sums, scale, formats)
    return Measured(measured, _sketches(shards, scale), _what_if(shards, totals, moments, others))


def _in_use(shards: Sequence[Shard], totals: SketchBatch, moments: Moments) -> tuple[torch.Tensor, QuantizationSums]:
    """The scale of each operand, float32 [B], NaN where none is known, and its sums under those that it was cast with."""
    scale = torch.tensor([s.scales[0] if s.scales else torch.nan for s in shards], dtype=torch.float32)
    limits = torch.tensor([FORMATS[s.cast.format].max for s in shards], dtype=torch.float32)
    amax = moments.amax.float()
    for i, shard in enumerate(shards):
        if shard.scales is None and (rule := _rule(shard)):
            scale[i] = rule.scale(amax[i], limits[i])
    of_sketches = figures.quantization_sums(totals, scale, [FORMATS[s.cast.format] for s in shards])
    rows_of_all = [s.sums or of_sketches.row(i) for i, s in enumerate(shards)]
    return scale, QuantizationSums.concat(rows_of_all) if rows_of_all else of_sketches


def _rule(shard: Shard) -> CurrentScaling | None:
    """The rule that finds a scale from the amax of the whole tensor."""
    rule = parse_recipe(shard.cast.recipe).scaling
    if isinstance(rule, CurrentScaling):
        return rule
    return CurrentScaling() if shard.sums is None else None  # delayed scaling without a history yet


def _about(shards: Sequence[Shard]) -> Columns:
    return {
        "layer": [s.key[0] for s in shards],
        "gemm": [s.kind for s in shards],
        "role": [s.key[1] for s in shards],
        "dtype": [s.cast.dtype for s in shards],
        "calls": [s.calls for s in shards],
        "shards": [s.shards for s in shards],
        "shards_missing": [s.missing for s in shards],
    }


def _moments(shards: Sequence[Shard], totals: SketchBatch) -> Moments:
    """Moments of each operand: those of its sketch, or the direct ones where the sketch is rounded."""
    of_sketches = figures.moments(totals)
    if not any(s.moments for s in shards):
        return of_sketches
    parts = []
    for i, shard in enumerate(shards):
        row = of_sketches.row(i)
        parts.append(shard.moments.with_median(row.median) if shard.moments else row)
    return Moments.concat(parts)


def _what_if(shards: Sequence[Shard], totals: SketchBatch, moments: Moments, others: Sequence[EmulatedScales]) -> Columns:
    tables = _weighed_by_sketches(shards, moments, [o for o in others if not o.recipe.in_blocks])
    tables += _weighed_directly(shards, moments, others)
    return {name: [value for table in tables for value in table[name]] for name in tables[0]} if tables else {}


def _weighed_by_sketches(shards: Sequence[Shard], moments: Moments, others: Sequence[EmulatedScales]) -> list[Columns]:
    chosen = [i for i, s in enumerate(shards) if not s.moments]
    if not chosen or not others:
        return []
    mine, rest = [shards[i] for i in chosen], Moments.concat([moments.row(i) for i in chosen])
    batch = SketchBatch.of([s.sketch for s in mine])
    keys, owner = [s.key for s in mine], torch.arange(len(mine))
    tables = []
    for other in others:
        measured = weigh(rest, batch, owner, other.of(keys, rest.amax.float()), other.formats(keys))
        tables.append(_about(mine) | _named(other, len(mine)) | measured)
        other.observe(keys, rest.amax.float())
    return tables


def _weighed_directly(shards: Sequence[Shard], moments: Moments, others: Sequence[EmulatedScales]) -> list[Columns]:
    tables = []
    for other in others:
        name = other.recipe.name
        if chosen := [i for i, s in enumerate(shards) if name in s.weighed]:
            mine, rest = [shards[i] for i in chosen], Moments.concat([moments.row(i) for i in chosen])
            keys = [s.key for s in mine]
            sums = QuantizationSums.concat([s.weighed[name] for s in mine])
            measured = rows(rest, sums, other.of(keys, rest.amax.float()), other.formats(keys))
            tables.append(_about(mine) | _named(other, len(mine)) | measured)
    return tables


def _named(other: EmulatedScales, n: int) -> Columns:
    return {"recipe": [other.recipe.name] * n, "scale_source": ["what-if"] * n}


def _sketches(shards: Sequence[Shard], scale: torch.Tensor) -> Columns:
    """The sketches as a table; bins of infinity and NaN included, so that a sketch is whole."""
    parts = [
        (shard.key, cast, found if shard.one_scale else known, sketch, sketch.counts.cpu().numpy())
        for shard, found in zip(shards, scale.double().tolist(), strict=True)
        for cast, known, sketch in shard.parts
    ]
    occupied = [counts.nonzero()[0] for *_, counts in parts]
    return {
        "layer": [layer for (layer, _), *_ in parts],
        "role": [role for (_, role), *_ in parts],
        "recipe": [cast.recipe for _, cast, *_ in parts],
        "format": [cast.format for _, cast, *_ in parts],
        "dtype": [str(sketch.dtype).removeprefix("torch.") for *_, sketch, _ in parts],
        "rounded": [sketch.rounded for *_, sketch, _ in parts],
        "scale": [None if scale != scale else scale for _, _, scale, *_ in parts],
        "bins": [bins.astype(np.uint16) for bins in occupied],
        "counts": [counts[bins] for (*_, counts), bins in zip(parts, occupied, strict=True)],
    }
