"""Make the columns of metrics for samples, what-if recipes and replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.keys import GRADIENTS
from .block_scaling import CODES, EMPTY, BlockScalingRule
from .formats import FloatFormat
from .metric_names import BLOCK_SCALES, METRICS, UNITS
from .metrics import QuantizationSums, ValueMoments, compute_metrics
from .tensor_scaling import CurrentScaling

_CURRENT = CurrentScaling()
#: codes of the smallest and the largest scale, in E8M0 and in float32's exponent
_POWERS = (0, 254)
#: codes of the smallest and the largest scale in E4M3: the smallest subnormal, and 448. A block with code 0 is lost
_E4M3 = (1, 0x7E)


def make_metric_columns(
    moments: ValueMoments, sums: QuantizationSums, scale: torch.Tensor, formats: Sequence[FloatFormat]
) -> dict[str, list[Any]]:
    """Return the columns of B operands, with None if a metric is not available.

    Args:
        scale: float32 [B], scales of the casts. NaN if unknown, or if blocks have scales of their own.
        formats: B formats.
    """
    current = _CURRENT.compute_scale(moments.amax.float(), torch.tensor([fmt.max for fmt in formats], dtype=torch.float32))
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


def unscale_gradient_columns(
    columns: Mapping[str, Sequence[Any]], multiplier: float | None
) -> dict[str, list[float | None]]:
    """Return the metrics in `UNITS`, divided so that they refer to gradients of the loss itself. They are None for X and W.

    Args:
        multiplier: the factor that multiplies the gradients in `columns`, not 0, or None if unknown.
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


def make_block_scale_columns(counts: torch.Tensor, rules: Sequence[BlockScalingRule]) -> dict[str, list[float | int | None]]:
    """Return the columns of B operands, in the order of `BLOCK_SCALES`. Values are None if all blocks are empty.

    We report the stored scales, which the codes are multiplied by. For float32 scales, we report the power of two at or
    below the scale. For NVFP4, we report the scales of the first level.

    Args:
        counts: int64 [B, 257], from `count_block_scales`.
        rules: B rules.
    """
    columns: dict[str, list[float | int | None]] = {name: [] for name in BLOCK_SCALES}
    for row, rule in zip(counts.tolist(), rules, strict=True):
        for name, value in zip(BLOCK_SCALES, _distribution(row, rule), strict=True):
            columns[name].append(value)
    return columns


def _distribution(row: Sequence[int], rule: BlockScalingRule) -> tuple[float | int | None, ...]:
    counts, total = row[:CODES], sum(row[:CODES])
    if not total:
        return 0, row[EMPTY], None, None, None, None, None
    values = _values(rule.two_level)
    low, high = _E4M3 if rule.two_level else _POWERS
    codes = [code for code, count in enumerate(counts) if count]
    reached, middle = 0, codes[0]
    for middle in codes:  # the lower of two middle values
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
