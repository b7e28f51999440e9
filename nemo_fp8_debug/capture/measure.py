"""From the operands of a sampled step to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..numerics import figures
from ..numerics.figures import FIGURES, Moments, QuantizationSums
from ..numerics.scaling import CurrentScaling
from ..numerics.sketch import DTYPES, SketchBatch
from .operands import Operand

_CURRENT = CurrentScaling()


def measure(operands: Sequence[Operand]) -> tuple[dict[str, list[Any]], torch.Tensor]:
    """All figures of operands that were seen at least once.

    Returns:
        The columns of the sample, and each operand's amax (float32 [B]) for histories of the caller.
    """
    moments = _moments(operands)
    limit = torch.tensor([o.in_use.format.max for o in operands])
    amax = moments.amax.float()
    current = _CURRENT.scale(amax, limit)
    scale = torch.stack([_scale(o, a) for o, a in zip(operands, amax, strict=True)]) if operands else torch.zeros(0)
    sums = _sums(operands)
    measured = figures.figures(moments, sums, scale, current)
    columns: dict[str, list[Any]] = {
        "layer": [o.gemm.name for o in operands],
        "gemm": [o.gemm.kind for o in operands],
        "role": [o.role for o in operands],
        "format": [o.in_use.format.name for o in operands],
        "dtype": [str(o.dtype).removeprefix("torch.") for o in operands],
        "scale_source": [o.in_use.source for o in operands],
        "calls": [o.calls for o in operands],
        "n": moments.n.tolist(),
        "nan": moments.nan.tolist(),
        "inf": moments.inf.tolist(),
        "scale": scale.double().tolist(),
        "scale_current": current.double().tolist(),
    }
    columns |= {name: [None if v != v else v for v in measured[name].tolist()] for name in FIGURES}
    return columns, amax


def _moments(operands: Sequence[Operand]) -> Moments:
    """Moments of each operand: those of its sketch, or the direct ones where the sketch is rounded."""
    rows = figures.moments(SketchBatch.of([o.total for o in operands]))
    if all(o.dtype in DTYPES for o in operands):
        return rows
    parts = []
    for i, operand in enumerate(operands):
        row = rows.row(i)
        if operand.moments:
            row = figures.merge(Moments.concat(operand.moments).cpu()).with_median(row.median)
        parts.append(row)
    return Moments.concat(parts)


def _scale(operand: Operand, amax: torch.Tensor) -> torch.Tensor:
    """The scale to report: the one in use, or the smallest of the calls where it follows the tensor."""
    scale = operand.in_use.scale
    if isinstance(scale, CurrentScaling):
        return scale.scale(amax, operand.in_use.format.max)
    return scale.detach().cpu().float()


def _sums(operands: Sequence[Operand]) -> QuantizationSums:
    """Sums of each operand: every sketch under the scale it was cast with, those of one operand added up."""
    from_sketch = [(i, o, s) for i, o in enumerate(operands) if not o.sums for s in o.sketches]
    batch = SketchBatch.of([s for _, _, s in from_sketch])
    amax = figures.moments(batch).amax.float()
    scales = [_scale(o, a) for (_, o, _), a in zip(from_sketch, amax, strict=True)]
    rows = figures.quantization_sums(
        batch, torch.stack(scales) if scales else torch.zeros(0), [o.in_use.format for _, o, _ in from_sketch]
    )
    direct = [(i, s.cpu()) for i, o in enumerate(operands) for s in o.sums]
    owner = torch.tensor([i for i, _, _ in from_sketch] + [i for i, _ in direct], dtype=torch.int64)
    return QuantizationSums.concat([rows, *(s for _, s in direct)]).fold(owner, len(operands))
