"""What grew while `soak.py` trained, by what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import theilslopes

#: what must not grow by more than that over the last three quarters
LIMITS = {"rss_mib": 8.0, "threads": 0.0, "open_files": 0.0, "cpu_ms_a_step": 0.2}
#: files of the record, at the most
MOST_FILES = 500


def growth(points: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """By how much each of `LIMITS` grew over the last three quarters: low, middle and high (95%).

    The slope is Theil's and Sen's, the median of those between all pairs of points: a merge of parts takes much for a
    moment, once in a long while.

    Args:
        points: `step` and what was measured at it, in order of steps.

    Example:
        >>> steady = {"threads": 9, "open_files": 11, "cpu_ms_a_step": 2}
        >>> growth([{"step": step, "rss_mib": 500 + step, **steady} for step in range(9)])["rss_mib"]
        [6.0, 6.0, 6.0]
    """
    late = points[len(points) // 4 :]
    at = np.array([point["step"] for point in late])
    found = {}
    for name in LIMITS:
        slope, _, low, high = theilslopes([point[name] for point in late], at)
        found[name] = [round(float((at[-1] - at[0]) * each), 3) for each in (low, slope, high)]
    return found
