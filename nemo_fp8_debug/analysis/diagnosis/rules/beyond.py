"""What no healthy operand does, whatever the run: the only evidence against an operand of a run that has no baseline."""

from __future__ import annotations

import polars as pl

#: samples at the beginning that are left out: scales are still made up
_FIRST = 2
#: samples in a row that count
_IN_A_ROW = 2
#: by role, bits that the scale in use is off, and percent of values that underflow and overflow, beyond which an operand is
#: not healthy; an order of magnitude, or 2 bits, above all clean runs of `scripts/validation/fault_injection`. Operands
#: of attention have no limits so far
LIMITS = {
    "input": {"scale": 3.0, "underflow": 8.0, "overflow": 3.0},
    "weight": {"scale": 3.0, "underflow": 4.0, "overflow": 2.0},
    "grad_output": {"scale": 8.0, "underflow": 25.0, "overflow": 3.0},
}


def beyond(metrics: pl.DataFrame) -> pl.DataFrame:
    """Operands that are beyond these limits for two samples in a row.

    Args:
        metrics: `metrics` table.

    Returns:
        layer, role, onset (step), excess (how many times a limit); the earliest first.

    Example:
        >>> nothing = {"layer": ["fc1"] * 5, "role": ["weight"] * 5, "underflow_pct": [0.0] * 5, "overflow_pct": [0.0] * 5}
        >>> off = pl.DataFrame(nothing | {"step": [0, 5, 10, 15, 20], "scale_ratio_log2": [9.0, 0, 0, 7, 7]})
        >>> beyond(off).row(0)
        ('fc1', 'weight', 15, 2.3333333333333335)
    """
    steps = metrics["step"].unique().sort()[_FIRST:]
    rows = metrics.filter(pl.col("step").is_in(steps.implode())).sort("step", maintain_order=True)
    times = rows.select("layer", "role", "step", excess=pl.max_horizontal(*_times())).with_columns(
        pl.col("excess").fill_null(0.0).fill_nan(0.0)
    )
    over = [pl.col("excess").shift(-i).over("layer", "role") for i in range(_IN_A_ROW)]
    lasting = times.with_columns(excess=pl.min_horizontal(*over)).filter(pl.all_horizontal(*[each > 1 for each in over]))
    groups = lasting.group_by("layer", "role", maintain_order=True)
    first = groups.agg(onset=pl.col("step").first(), excess=pl.col("excess").first())
    return first.sort("onset", -pl.col("excess"), maintain_order=True)


def _times() -> list[pl.Expr]:
    """How many times each limit a row shows."""
    columns = {"scale": "scale_ratio_log2", "underflow": "underflow_pct", "overflow": "overflow_pct"}
    shown = {name: pl.col(column).abs() for name, column in columns.items()}
    return [
        shown[name]
        / pl.col("role").replace_strict(
            {role: of[name] for role, of in LIMITS.items()}, default=None, return_dtype=pl.Float64
        )
        for name in shown
    ]
