"""What no healthy operand does, whatever the run: by role, limits of three metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: by role and metric, beyond which an operand is not healthy: bits that the scale in use is off, and percent of values that
#: underflow and overflow. An order of magnitude, or 2 bits, above all clean runs of `scripts/validation/fault_injection`.
#: Operands of attention have no limits so far
LIMITS: Mapping[str, Mapping[str, float]] = {
    "input": {"scale_ratio_log2": 3.0, "underflow_pct": 8.0, "overflow_pct": 3.0},
    "weight": {"scale_ratio_log2": 3.0, "underflow_pct": 4.0, "overflow_pct": 2.0},
    "grad_output": {"scale_ratio_log2": 8.0, "underflow_pct": 25.0, "overflow_pct": 3.0},
}
#: values that must underflow or overflow at least: percents of the few that an expert gets tell little
LEAST_VALUES = 24
#: formats that they are of: FP4 loses more in runs that go well, and how much has not been measured
FORMATS = ("e4m3", "e5m2")
#: samples at the beginning of a run whose scales are still made up
MADE_UP = 2
#: how many times a limit a sample must show, if the one before it is within: a spike of gradients clips for a step, and a
#: healthy run goes on
FAR = 3.0


def find_worst(role: str, metrics: Mapping[str, float | None], n: float | None = None) -> tuple[str | None, float]:
    """The metric that is the most times its limit, and how many times.

    Args:
        n: values of the operand; None: it is not known.

    Example:
        >>> find_worst("weight", {"scale_ratio_log2": -6.0, "underflow_pct": 1.0, "overflow_pct": None})
        ('scale_ratio_log2', 2.0)
        >>> find_worst("input", {"overflow_pct": 15.0}, n=320)
        ('overflow_pct', 2.0)
        >>> find_worst("query", {"underflow_pct": 99.0})
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
