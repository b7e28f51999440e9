"""Figures as rows of a table: what a sample, a what-if and a replay have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .figures import FIGURES, Moments, QuantizationSums, figures, quantization_sums
from .formats import FloatFormat
from .scaling import CurrentScaling
from .sketch import SketchBatch

_CURRENT = CurrentScaling()


def rows(
    moments: Moments, sums: QuantizationSums, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> dict[str, list[Any]]:
    """Columns of B operands, None where a figure cannot be had.

    Args:
        scale: float32 [B], that the operands were cast with.
        formats: B formats.
    """
    current = _CURRENT.scale(moments.amax.float(), torch.tensor([fmt.max for fmt in formats], dtype=torch.float32))
    measured = figures(moments, sums, scale, current)
    return {
        "format": [fmt.name for fmt in formats],
        "n": moments.n.tolist(),
        "nan": moments.nan.tolist(),
        "inf": moments.inf.tolist(),
        "scale": scale.double().tolist(),
        "scale_current": current.double().tolist(),
        **{name: [None if v != v else v for v in measured[name].tolist()] for name in FIGURES},
    }


def weigh(
    moments: Moments, parts: SketchBatch, owner: torch.Tensor, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> dict[str, list[Any]]:
    """Columns of B operands from the sketches of their parts, each cast with one scale; the smallest of them is shown.

    Args:
        owner: int64 [P], the operand that each part belongs to.
        scale: float32 [P].
        formats: P formats, the same for all parts of an operand.
    """
    n = len(moments.n)
    sums = quantization_sums(parts, scale, formats).fold(owner, n)
    smallest = torch.full((n,), torch.inf, dtype=torch.float32).scatter_reduce_(0, owner, scale, "amin")
    of_operand = dict(zip(owner.tolist(), formats, strict=True))
    return rows(moments, sums, smallest, [of_operand[i] for i in range(n)])
