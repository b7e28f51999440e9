"""Metrics as rows of a table: what a sample, a what-if and a replay have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.keys import GRADIENTS
from .formats import FloatFormat
from .metric_names import METRICS, UNITS
from .metrics import Moments, QuantizationSums, metrics_of
from .tensor_scaling import CurrentScaling

_CURRENT = CurrentScaling()


def rows(
    moments: Moments, sums: QuantizationSums, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> dict[str, list[Any]]:
    """Columns of B operands, None where a metric cannot be had.

    Args:
        scale: float32 [B], that the operands were cast with; NaN where none is known, or blocks have scales of their own.
        formats: B formats.
    """
    current = _CURRENT.scale(moments.amax.float(), torch.tensor([fmt.max for fmt in formats], dtype=torch.float32))
    measured = metrics_of(moments, sums, scale, current)
    return {
        "format": [fmt.name for fmt in formats],
        "n": moments.n.tolist(),
        "nan": moments.nan.tolist(),
        "inf": moments.inf.tolist(),
        "scale": _absent_as_none(scale.double()),
        "scale_current": current.double().tolist(),
        **{name: _absent_as_none(measured[name]) for name in METRICS},
    }


def unscaled(columns: Mapping[str, Sequence[Any]], multiplier: float | None) -> dict[str, list[float | None]]:
    """Columns of the metrics of gradients that have a unit, as gradients of the loss itself; None of others.

    Args:
        multiplier: of the gradients in `columns`, not 0; None where it is not known.
    """
    if not columns:
        return {}

    def divided(name: str, power: int) -> list[float | None]:
        rows = zip(columns["role"], columns[name], strict=True)
        return [
            None if multiplier is None or role not in GRADIENTS or value is None else value / abs(multiplier) ** power
            for role, value in rows
        ]

    return {f"unscaled_{name}": divided(name, power) for name, power in UNITS.items()}


def _absent_as_none(column: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]
