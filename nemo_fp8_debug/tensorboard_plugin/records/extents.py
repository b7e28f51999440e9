"""Where the values of a metric lie: ends, percentiles and how many values have which size, a warm-up apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...record.storage import Storage
from ..web.json_values import plain
from .extent import Extent, coarser, merged
from .part_matrices import Index, Parts

#: part of the sampled steps that are warm-up
WARM_UP = 0.1
#: percentiles of robust limits
PERCENTILES = (1.0, 50.0, 99.0)


def extent(parts: Parts, run: Storage, metric: str) -> dict[str, Any]:
    """Of a metric over all sampled steps that can be read: the least and the largest finite value, the least above 0; and
    without the warm-up, the first tenth of the samples, percentiles and how many values there are of which size.

    Returns:
        low, high, positive; warm_up (its last step, None where there is but one sample); percentiles (of 1, 50 and 99);
        values and counts (rounded to 4 significant bits, ascending).
    """

    def read(index: Index) -> dict[str, Any]:
        warm_up = end_of_warm_up(index)
        until = -1 if warm_up is None else warm_up
        early = _found(parts, run, index, metric, lambda step: step <= until)
        late = _found(parts, run, index, metric, lambda step: step > until)
        whole, later = merged([*early, *late]), merged(late or early)
        values, counts = coarser(later)
        return plain(  # type: ignore[no-any-return]
            {
                "low": whole.low,
                "high": whole.high,
                "positive": whole.positive,
                "warm_up": warm_up,
                "percentiles": [later.quantile(percent) for percent in PERCENTILES],
                "values": values.tolist(),
                "counts": counts.tolist(),
            }
        )

    return parts.settled(run, read)


def end_of_warm_up(index: Index) -> int | None:
    """The last step of a run's warm-up; None where there is but one sample."""
    return int(index.steps[int(np.ceil(WARM_UP * len(index.steps))) - 1]) if len(index.steps) > 1 else None


def _found(parts: Parts, run: Storage, index: Index, metric: str, wanted: Callable[[int], bool]) -> list[Extent]:
    """Of each part, at those of its steps that are wanted."""
    found = []
    for part, steps in index.held.items():
        if kept := [step for step in steps if wanted(step)]:
            ask = partial(parts.extent, run, part, metric, kept)
            found.append(parts.unless_damaged(run, part, metric, ask))
    return [extent for extent in found if extent is not None]
