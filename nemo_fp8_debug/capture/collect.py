"""From the operands that a rank captured to the shards that add up over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..measurement.operand_stats import Cast, Shard
from ..numerics import metrics
from ..numerics.histogram import Sketch
from ..numerics.metrics import Moments, QuantizationSums
from ..numerics.precomputed import Sketches
from ..numerics.tensor_scaling import CurrentScaling, scales_of
from .backends.base import ScaleInUse
from .operands import Operand


def collect(operands: Sequence[Operand]) -> list[Shard]:
    """What is known of each operand that was seen at least once."""
    seen = [o for o in operands if o.calls]
    known = _UnderScales([o for o in seen if not o.deferred])
    return [_shard(operand, known) for operand in seen]


def _shard(operand: Operand, known: _UnderScales) -> Shard:
    total = operand.total
    moments = metrics.merge(Moments.concat(operand.moments).cpu()) if operand.moments else None
    cast = cast_of(operand.casts[0], operand)
    mine = known.of.get(operand.key)
    return Shard(
        key=operand.key,
        kind=operand.gemm.kind,
        cast=cast,
        sketch=total,
        amax=float(moments.amax) if moments else total.amax,
        moments=moments,
        sums=_total(operand.sums) if operand.sums else mine and mine[0],
        weighed={name: _total(rows) for name, rows in operand.weighed.items()},
        scales=mine and mine[1],
        parts=mine[2] if mine else [(cast, None, total)],
        calls=operand.calls,
        nonfinite_order=operand.nonfinite_order,
    )


def cast_of(use: ScaleInUse, operand: Operand) -> Cast:
    """How an operand was cast, in words."""
    return Cast(use.recipe, use.format.name, use.source, str(operand.dtype).removeprefix("torch."))


def _total(parts: Sequence[QuantizationSums]) -> QuantizationSums:
    return QuantizationSums.concat([part.cpu() for part in parts]).total()


Parts = list[tuple[Cast, float | None, Sketch]]


class _UnderScales:
    """Operands whose scales are known on this rank: each of their sketches under the scale that it was cast with."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        parts = [(i, o, u, s) for i, o in enumerate(operands) for u, s in zip(o.casts, o.sketches, strict=True)]
        uses = [use for _, _, use, _ in parts]
        sketches = Sketches([sketch for *_, sketch in parts])
        owner = torch.tensor([i for i, *_ in parts], dtype=torch.int64)
        held = [use.scale if isinstance(use.scale, (torch.Tensor, CurrentScaling)) else None for use in uses]
        formats = [use.format for use in uses]
        scales = scales_of(held, formats, _amax(operands, sketches))
        counted = [row for row, (_, operand, *_) in enumerate(parts) if not operand.sums]
        of_counted = sketches.only(counted).quantization_sums(scales[counted], [formats[row] for row in counted])
        sums = of_counted.fold(owner[counted], len(operands))
        #: by key: sums, smallest and largest scale, and the sketches with their scales
        self.of: dict[tuple[str, str], tuple[QuantizationSums, tuple[float, float] | None, Parts]] = {}
        found: list[Parts] = [[] for _ in operands]
        for (i, operand, use, sketch), scale in zip(parts, scales.double().tolist(), strict=True):
            found[i].append((cast_of(use, operand), None if scale != scale else scale, sketch))
        for i, operand in enumerate(operands):
            used = [scale for _, scale, _ in found[i] if scale is not None]
            mine = sums.row(i)
            if operand.rest_casts:
                used += [float(use.scale) for use in operand.rest_casts if isinstance(use.scale, torch.Tensor)]
                mine = _total([mine, *operand.rest_sums])
                found[i] = [(cast_of(operand.casts[0], operand), None, operand.total)]
            self.of[operand.key] = mine, (min(used), max(used)) if used else None, found[i]


def _amax(operands: Sequence[Operand], sketches: Sketches) -> torch.Tensor:
    """float32 [P], of each sketch of each operand; exact for float32 operands, whose sketches are rounded."""
    amax, i = sketches.amax(), 0
    for operand in operands:
        if len(operand.moments) == len(operand.sketches):
            for direct in operand.moments:
                amax[i] = direct.amax.float()
                i += 1
        else:
            i += len(operand.sketches)
    return amax
