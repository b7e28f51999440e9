"""Metrics as rows of a table: what a sample, a what-if and a replay have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.keys import GRADIENTS
from .block_scaling import CODES, EMPTY, BlockRule
from .formats import FloatFormat
from .metric_names import BLOCK_SCALES, METRICS, UNITS
from .metrics import Moments, QuantizationSums, compute_metrics
from .tensor_scaling import CurrentScaling

_CURRENT = CurrentScaling()
#: E8M0 and the exponents of float32: codes of the smallest scale and of the largest
_POWERS = (0, 254)
#: E4M3: from zero, which loses its block, to the least subnormal; and 448
_E4M3 = (1, 0x7E)


def make_metric_columns(
    moments: Moments, sums: QuantizationSums, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> dict[str, list[Any]]:
    """Columns of B operands, None where a metric cannot be had.

    Args:
        scale: float32 [B], that the operands were cast with; NaN where none is known, or blocks have scales of their own.
        formats: B formats.
    """
    current = _CURRENT.scale(moments.amax.float(), torch.tensor([fmt.max for fmt in formats], dtype=torch.float32))
    measured = compute_metrics(moments, sums, scale, current)
    return {
        "format": [fmt.name for fmt in formats],
        "n": moments.n.tolist(),
        "nan": moments.nan.tolist(),
        "inf": moments.inf.tolist(),
        "scale": _absent_as_none(scale.double()),
        "scale_current": current.double().tolist(),
        **{name: _absent_as_none(measured[name]) for name in METRICS},
    }


def unscale_columns(columns: Mapping[str, Sequence[Any]], multiplier: float | None) -> dict[str, list[float | None]]:
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


def make_block_scale_columns(counts: torch.Tensor, rules: Sequence[BlockRule]) -> dict[str, list[float | int | None]]:
    """Columns of B operands, as `BLOCK_SCALES`; None where no block has values.

    Scales are those that are kept, by which codes are multiplied; of float32 ones the power of two at or below. Of NVFP4
    they are those of the first level.

    Args:
        counts: int64 [B, 257], as `count_block_scales` gives them.
        rules: B of them.
    """
    columns: dict[str, list[float | int | None]] = {name: [] for name in BLOCK_SCALES}
    for row, rule in zip(counts.tolist(), rules, strict=True):
        for name, value in zip(BLOCK_SCALES, _distribution(row, rule), strict=True):
            columns[name].append(value)
    return columns


def _distribution(row: Sequence[int], rule: BlockRule) -> tuple[float | int | None, ...]:
    counts, total = row[:CODES], sum(row[:CODES])
    if not total:
        return 0, row[EMPTY], None, None, None, None, None
    values = _values(rule.two_level)
    low, high = _E4M3 if rule.two_level else _POWERS
    codes = [code for code, count in enumerate(counts) if count]
    reached, middle = 0, codes[0]
    for middle in codes:  # the lower of two in the middle
        reached += counts[middle]
        if 2 * reached >= total:
            break
    smallest, largest = sum(counts[: low + 1]), sum(counts[high:])
    share = 100 / total
    return total, row[EMPTY], values[codes[0]], values[middle], values[codes[-1]], share * smallest, share * largest


def _values(is_e4m3: bool) -> list[float]:
    if is_e4m3:
        return torch.arange(CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    return torch.exp2(torch.arange(CODES, dtype=torch.float64) - 127).tolist()
