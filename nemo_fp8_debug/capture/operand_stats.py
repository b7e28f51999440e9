"""Statistics of an operand after a sampled step: of one rank's part, or of the whole tensor, summed over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..core.keys import MIXED, Key
from ..kernels.cpu.histograms import Histograms
from ..numerics.histogram import Histogram
from ..numerics.metrics import QuantizationSums, ValueMoments, merge_moments, sum_over_calls
from ..numerics.recipe import RecipeReference
from ..numerics.tensor_scaling import CurrentScaling, compute_cast_scales
from .backends.base import CastInUse
from .operands import OperandAccumulator


@dataclass(frozen=True)
class CastDescription(RecipeReference):
    """How an operand was cast, in words."""

    recipe: str
    format: str
    #: see `CastInUse.source`; MIXED if the operands in a sum have different sources
    source: str
    #: dtype of the observed tensor
    dtype: str
    #: recipe, format and source of the copy that another GEMM uses as its operand; "" if the copy has the same values or
    #: is unknown
    copy_recipe: str = ""
    copy_format: str = ""
    copy_source: str = ""


@dataclass
class OperandStats:
    """Statistics of a rank's part of an operand in a step, over all micro-batches. The statistics of parts can be summed."""

    #: (layer, role)
    key: Key
    #: kind of the GEMM, see `Gemm.kind`
    kind: str
    cast: CastDescription
    #: histogram of all calls together
    histogram: Histogram
    #: largest finite magnitude
    amax: float
    #: one row if the operand is float32, because its histogram is rounded; otherwise None
    moments: ValueMoments | None
    #: one row under the scales in use, or None under current scaling, because the scale needs the whole tensor's amax
    sums: QuantizationSums | None
    #: by name of a what-if recipe that histograms cannot evaluate: one row
    what_if: dict[str, QuantizationSums] = field(default_factory=dict)
    #: one row for the copy that another GEMM uses as its operand, if we measure this copy and all calls have one
    copy: QuantizationSums | None = None
    #: smallest and largest scale in use, or None if unknown yet, or if blocks have their own scales
    scales: tuple[float, float] | None = None
    #: separate histograms with one scale each, together with the cast and the scale of each; empty if none are kept
    parts: Sequence[tuple[CastDescription, float | None, Histogram]] = ()
    #: number of blocks with each scale, int64 [257], or None if this is not enabled
    block_scales: torch.Tensor | None = None
    #: other sums that cannot be computed from a histogram, float64, as for the option `activations`
    further: torch.Tensor | None = None
    calls: int = 0
    #: place in the order of execution of the first call with NaN or infinity
    nonfinite_order: int | None = None
    #: ranks whose statistics are included
    ranks: int = 1
    #: ranks whose statistics are missing
    missing: int = 0

    @property
    def has_single_scale(self) -> bool:
        """True if one scale applies to the whole operand, in its cast or only in our measurement."""
        return self.scales is None or self.scales[0] == self.scales[1]


def merge_operand_stats(key: Key, stats: Sequence[OperandStats]) -> OperandStats:
    """Combine statistics with the same recipe, format and dtype. Leave out sums, because scales may still be unknown."""
    first = stats[0]
    direct = [s.moments for s in stats if s.moments]
    orders = [s.nonfinite_order for s in stats if s.nonfinite_order is not None]
    sources = {s.cast.source for s in stats}
    scales = [s.block_scales for s in stats if s.block_scales is not None]
    return OperandStats(
        key=key,
        kind=first.kind,
        cast=replace(first.cast, source=first.cast.source if len(sources) == 1 else MIXED),
        histogram=Histogram.sum_histograms([s.histogram for s in stats]),
        amax=max(s.amax for s in stats),
        moments=merge_moments(ValueMoments.concat(direct)) if direct else None,
        sums=None,
        block_scales=torch.stack(scales).sum(0) if len(scales) == len(stats) else None,
        calls=sum(s.calls for s in stats),
        nonfinite_order=min(orders, default=None),
        ranks=sum(s.ranks for s in stats),
        missing=sum(s.missing for s in stats),
    )


def collect_operand_stats(operands: Sequence[OperandAccumulator]) -> list[OperandStats]:
    """Return the statistics of each operand that was observed at least once."""
    seen = [o for o in operands if o.calls]
    for operand in seen:
        operand.add_up_kernel_sums()
    known = _UnderScales([o for o in seen if not o.is_scale_deferred])
    return [_shard(operand, known) for operand in seen]


def _shard(operand: OperandAccumulator, known: _UnderScales) -> OperandStats:
    moments, mine = operand.total_moments, known.of.get(operand.key)
    total, cast = operand.total_histogram, describe_cast(operand.casts[0], operand)
    return OperandStats(
        key=operand.key,
        kind=operand.gemm.kind,
        cast=cast,
        histogram=total,
        amax=float(moments.amax) if moments else total.amax,
        moments=moments,
        sums=sum_over_calls(operand.sums) if operand.sums else mine and mine[0],
        what_if={name: sum_over_calls(rows) for name, rows in operand.what_if_sums.items()},
        copy=sum_over_calls(operand.copy_sums) if _copy_is_known(operand) else None,
        scales=mine and mine[1],
        parts=mine[2] if mine else [(cast, None, total)],
        block_scales=operand.block_scales if all(use == operand.casts[0] for use in operand.casts) else None,
        further=operand.further,
        calls=operand.calls,
        nonfinite_order=operand.nonfinite_order,
    )


def describe_cast(use: CastInUse, operand: OperandAccumulator) -> CastDescription:
    """Describe how an operand was cast."""
    words = use.recipe.name, use.format.name, use.source, str(operand.dtype).removeprefix("torch.")
    if not _copy_is_known(operand):
        return CastDescription(*words)
    copy = operand.copy_casts[0]
    return CastDescription(*words, copy.recipe.name, copy.format.name, copy.source)


def _copy_is_known(operand: OperandAccumulator) -> bool:
    """Return True if every call has a copy, and all copies have the same cast."""
    return 0 < len(operand.copy_casts) == operand.calls and all(c == operand.copy_casts[0] for c in operand.copy_casts)


Parts = list[tuple[CastDescription, float | None, Histogram]]


class _UnderScales:
    """Results for operands on this rank whose scales are known. Each histogram is evaluated under the scale of its cast."""

    def __init__(self, operands: Sequence[OperandAccumulator]) -> None:
        parts = [(i, o, u, s) for i, o in enumerate(operands) for u, s in zip(o.casts, o.histograms, strict=True)]
        uses = [use for _, _, use, _ in parts]
        casts = [describe_cast(use, operand) for _, operand, use, _ in parts]
        histograms = Histograms([histogram for *_, histogram in parts])
        owner = torch.tensor([i for i, *_ in parts], dtype=torch.int64)
        held = [use.scale if isinstance(use.scale, (torch.Tensor, CurrentScaling)) else None for use in uses]
        formats = [use.format for use in uses]
        amax = _amax(operands, histograms, uses)
        scales = compute_cast_scales(held, formats, amax)
        counted = [row for row, (_, operand, *_) in enumerate(parts) if not operand.sums]
        of_counted = histograms.select(counted).quantization_sums(scales[counted], [formats[row] for row in counted])
        sums = of_counted.sum_rows_by_owner(owner[counted], len(operands)).each()
        #: by key: sums, the smallest and the largest scale, and histograms with their scales
        self.of: dict[tuple[str, str], tuple[QuantizationSums, tuple[float, float] | None, Parts]] = {}
        found: list[Parts] = [[] for _ in operands]
        for (i, _, _, histogram), cast, scale in zip(parts, casts, scales.double().tolist(), strict=True):
            found[i].append((cast, None if scale != scale else scale, histogram))
        for i, operand in enumerate(operands):
            used = [scale for _, scale, _ in found[i] if scale is not None]
            mine = sums[i]
            if operand.rest_casts:
                used += [float(use.scale) for use in operand.rest_casts if isinstance(use.scale, torch.Tensor)]
                mine = sum_over_calls([mine, *operand.rest_sums])
                found[i] = [(found[i][0][0], None, operand.total_histogram)]
            self.of[operand.key] = mine, (min(used), max(used)) if used else None, found[i]


def _amax(operands: Sequence[OperandAccumulator], histograms: Histograms, uses: Sequence[CastInUse]) -> torch.Tensor:
    """Return the amax that each histogram's cast uses, float32 [P]. It is exact, although float32 histograms are rounded."""
    amax, inf, i = histograms.amax(), histograms.value_moments.inf.clone(), 0
    for operand in operands:
        if len(operand.moments) == len(operand.histograms):
            for direct in (m.summed_row for m in operand.moments):
                amax[i], inf[i] = direct.amax.float(), direct.inf
                i += 1
        else:
            i += len(operand.histograms)
    seen = torch.tensor([use.counts_infinity_in_amax for use in uses], dtype=torch.bool)
    return torch.where(seen & (inf > 0), torch.inf, amax)
