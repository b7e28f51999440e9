"""From the operands of a sampled step to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..numerics import figures
from ..numerics.figures import FIGURES, Moments, QuantizationSums
from ..numerics.scaling import CurrentScaling
from ..numerics.sketch import SketchBatch
from .operands import Operand

_CURRENT = CurrentScaling()


def measure(operands: Sequence[Operand]) -> tuple[dict[str, list[Any]], torch.Tensor]:
    """All figures of operands that were seen at least once.

    Returns:
        The columns of the sample, and each operand's amax (float32 [B]) for histories of the caller.
    """
    totals = SketchBatch.of([o.total for o in operands])
    moments = _moments(operands, totals)
    amax = moments.amax.float()
    current = _CURRENT.scale(amax, _limits(operands))
    scale = _scales(operands, amax)
    sums = _sums(operands, totals)
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


def _limits(operands: Sequence[Operand]) -> torch.Tensor:
    return torch.tensor([o.in_use.format.max for o in operands])


def _moments(operands: Sequence[Operand], totals: SketchBatch) -> Moments:
    """Moments of each operand: those of its sketch, or the direct ones where the sketch is rounded."""
    rows = figures.moments(totals)
    if not any(o.moments for o in operands):
        return rows
    parts = []
    for i, operand in enumerate(operands):
        row = rows.row(i)
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


def _sums(operands: Sequence[Operand], totals: SketchBatch) -> QuantizationSums:
    """Sums of each operand: every sketch under the scale it was cast with, those of one operand added up."""
    parts = [(i, s) for i, o in enumerate(operands) if not o.sums for s in o.sketches]
    owner = torch.tensor([i for i, _ in parts], dtype=torch.int64)
    whole = owner.tolist() == list(range(len(operands)))
    batch = totals if whole else SketchBatch.of([s for _, s in parts])
    owners = [operands[i] for i, _ in parts]
    scales = _scales(owners, batch.amax())
    rows = figures.quantization_sums(batch, scales, [o.in_use.format for o in owners])
    if whole:
        return rows
    direct = [(i, s.cpu()) for i, o in enumerate(operands) for s in o.sums]
    owner = torch.cat([owner, torch.tensor([i for i, _ in direct], dtype=torch.int64)])
    return QuantizationSums.concat([rows, *(s for _, s in direct)]).fold(owner, len(operands))
