"""Stochastic rounding: what is expected of a cast that rounds each value up or down, as likely as its neighbor is near."""

from __future__ import annotations

import torch

from .formats import E2M1, FloatFormat
from .metrics import QuantizationSums, beyond

#: magnitudes of E2M1, ascending
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def expected_sums(x: torch.Tensor, scaled: torch.Tensor, scale_inv: torch.Tensor, fmt: FloatFormat) -> QuantizationSums:
    """The expected values of the sums (one row), counts rounded; their spread is not told.

    A value at a share p of the way from one neighbor to the next is rounded up with probability p, so that its mean is
    itself. What lies beyond the range saturates.

    Args:
        x: finite values, float32.
        scaled: the same as they are cast, float32.
        scale_inv: float64, multiplies a code to give what it stands for; of a shape that goes with x.
        fmt: E2M1, the one format that Transformer Engine rounds so.
    """
    if fmt != E2M1:
        raise ValueError(f"stochastic rounding is known of E2M1, not of {fmt.name}")
    steps = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=x.device)
    size = scaled.abs().clamp_max(fmt.max)
    at = (torch.searchsorted(steps, size, right=True) - 1).clamp_max(len(steps) - 2)
    low, high = steps[at].double(), steps[at + 1].double()
    size = size.double()
    up, sign = (size - low) / (high - low), torch.sign(scaled).double()
    mean, variance = sign * size * scale_inv, (size - low) * (high - size) * scale_inv**2
    zero, lost = torch.where(low == 0, 1 - up, 0.0), scale_inv == 0
    of_zero = torch.where(lost.expand_as(zero), 1.0, zero)
    values = x.double()
    return QuantizationSums(
        underflows=(of_zero * (x != 0)).sum().round().long()[None],
        overflows=(beyond(scaled, fmt) & ~lost).sum()[None],
        sum_error2=((values - mean).square() + variance).sum()[None],
        sum_xq=(values * mean).sum()[None],
        sum_q2=(mean.square() + variance).sum()[None],
    )
