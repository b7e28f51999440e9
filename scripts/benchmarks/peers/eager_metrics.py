"""The metrics of docs/metrics.md as one would write them by hand: each formula in torch, over one operand at a time."""

from __future__ import annotations

import torch

#: as many as there are of ours, in their order, and the two counts
NAMES = (
    *("underflow_pct", "overflow_pct", "mse", "relative_error", "sqnr_db", "cosine", "scale_ratio_log2"),
    *("amax", "amin", "dynamic_range_log2", "outlier_log2", "kurtosis", "nan", "inf"),
)


def eager_metrics(x: torch.Tensor, target: torch.dtype, precision: torch.dtype) -> dict[str, float]:
    """All metrics of one tensor under its current scale.

    Args:
        x: any shape; holds a value that is finite and not zero.
        target: an FP8 dtype.
        precision: what sums are taken in: float64 as ours are, or float32 as most would.
    """
    limit = torch.finfo(target).max
    values = x.detach().float()
    finite = values[values.isfinite()]
    current = torch.tensor(limit) / finite.abs().max()
    scale = current  # what has no engine casts under current scaling
    product = finite * scale
    q = product.clamp(-limit, limit).to(target).to(precision) / scale
    x = finite.to(precision)
    magnitude = x.abs()
    nonzero = magnitude[magnitude > 0]
    amax, amin, median = nonzero.max(), nonzero.min(), nonzero.median()
    error2, square = ((x - q) ** 2).sum(), (x**2).sum()
    relative_error = (error2 / square).sqrt()
    found = torch.stack(
        [
            100 * ((x != 0) & (q == 0)).sum().to(precision) / x.numel(),
            100 * (product.abs() > limit * (1 + 2**-22)).sum().to(precision) / x.numel(),
            error2 / x.numel(),
            relative_error,
            -20 * relative_error.log10(),
            (x * q).sum() / (square * (q**2).sum()).sqrt(),
            (scale / current).log2(),
            amax,
            amin,
            (amax / amin).log2(),
            (amax / median).log2(),
            x.numel() * (x**4).sum() / square**2,
            values.isnan().sum(),
            values.isinf().sum(),
        ]
    )
    return dict(zip(NAMES, found.tolist(), strict=True))
