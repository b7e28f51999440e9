"""From which place on a series stays high."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: standard deviations from which on values count as equally high: a steep rise is found where it begins
_HIGH = 6.0
#: of the largest value, the standard deviation that is assumed where there is no noise
_LEAST = 1e-6


def stays(high: npt.NDArray[np.bool_], apart: Floats, half: int, after: int = -1) -> int | None:
    """First place behind `after` from which a series is high to its end, for longer than half a window; None: it is not.

    Args:
        high: whether the smoothed series is high.
        apart: the series itself, less what is usual; medians turn a little early or late, it tells exactly.
        half: half the width of the smoothing.

    Example:
        >>> apart = np.repeat([0.0, 1.0], 20)
        >>> stays(apart > 0.5, apart, 4)
        20
    """
    low = np.flatnonzero(~high)
    first = max(after, int(low[-1]) if len(low) else -1) + 1
    if first >= len(high) - half:
        return None
    return _exactly(apart, first, half)


def _exactly(apart: Floats, first: int, half: int) -> int:
    """The place around `first` that splits the values best in two levels."""
    start, stop = max(first - 2 * half, 0), min(first + 2 * half, len(apart))
    before = apart[max(start - half, 0) : max(first - half, 2)] if first else np.zeros(1)
    before = before[np.isfinite(before)]
    usual = float(np.median(before)) if len(before) else 0.0
    spread = 1.4826 * float(np.median(np.abs(before - usual))) if len(before) else 0.0
    largest = float(np.max(np.abs(apart), where=np.isfinite(apart), initial=0.0))
    spread = max(spread, _LEAST * largest) or 1.0
    values = np.clip(np.nan_to_num(apart[start:stop] - usual, nan=0.0, posinf=np.inf), -_HIGH * spread, _HIGH * spread)
    counts = np.arange(1, len(values))
    sums = np.cumsum(values)
    left, right = sums[:-1] / counts, (sums[-1] - sums[:-1]) / (len(values) - counts)
    explained = counts * left**2 + (len(values) - counts) * right**2
    near = slice(max(first - half - start - 1, 0), first + half - start)
    at = near.start + int(np.argmax(explained[near]))
    # What is high from the beginning has no lower level before.
    return 0 if first == 0 and left[at] > right[at] / 2 else start + 1 + at
