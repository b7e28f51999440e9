"""Limits of three metrics for each role. In healthy runs, no operand exceeds its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: limits by role and metric: the error of the scale in use, in bits, and the percentages of values that underflow and
#: overflow. Compared with the largest values in all clean runs of `scripts/validation/fault_injection`, percentages are 10
#: times as large, and bits are 2 higher. Operands of attention have no limits so far
LIMITS: Mapping[str, Mapping[str, float]] = {
    "input": {"scale_ratio_log2": 3.0, "underflow_pct": 8.0, "overflow_pct": 3.0},
    "weight": {"scale_ratio_log2": 3.0, "underflow_pct": 4.0, "overflow_pct": 2.0},
    "grad_output": {"scale_ratio_log2": 8.0, "underflow_pct": 25.0, "overflow_pct": 3.0},
}
#: least number of values that must underflow or overflow, because a percentage of an expert's few values means little
LEAST_VALUES = 24
#: formats with these limits. FP4 loses more in healthy runs, but we have not measured how much more
FORMATS = ("e4m3", "e5m2")
#: number of first samples of a run to which these limits do not apply, because scales have not settled yet
MADE_UP = 2
#: a sample counts only if it exceeds this multiple of the limit, or if the previous sample exceeds the limit too. In a
#: healthy run, a spike of gradients may overflow for one step
FAR = 3.0


def find_most_exceeded_limit(
    role: str, metrics: Mapping[str, float | None], n: float | None = None
) -> tuple[str | None, float]:
    """Return the metric with the largest ratio to its limit, and this ratio.

    Args:
        n: number of the operand's values, or None if unknown.

    Example:
        >>> find_most_exceeded_limit("weight", {"scale_ratio_log2": -6.0, "underflow_pct": 1.0, "overflow_pct": None})
        ('scale_ratio_log2', 2.0)
        >>> find_most_exceeded_limit("input", {"overflow_pct": 15.0}, n=320)
        ('overflow_pct', 2.0)
        >>> find_most_exceeded_limit("query", {"underflow_pct": 99.0})
        (None, 0.0)
    """
    worst, most = None, 0.0
    for name, limit in LIMITS.get(role, {}).items():
        value = metrics.get(name)
        if n and name.endswith("_pct"):
            limit = max(limit, 100 * LEAST_VALUES / n)
        if value is not None and not math.isnan(value) and abs(value) / limit > most:
            worst, most = name, abs(value) / limit
    return worst, most
