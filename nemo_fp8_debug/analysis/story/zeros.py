"""Since when all values of a tensor are zero: what the format loses of it tells nothing then."""

from __future__ import annotations

import numpy as np

from ...core.keys import Key
from ..runs.grid import Grid


def zero_since(grid: Grid) -> dict[Key, int]:
    """By tensor, the first sample from which on all its values are zero, to the end; others are left out.

    Example:
        >>> rows = {"step": [0, 10, 20], "layer": ["fc1"] * 3, "role": ["input"] * 3, "amax": [0.5, 0.0, 0.0]}
        >>> zero_since(Grid.of_table(pl.DataFrame(rows | {"nan": [0] * 3, "inf": [0] * 3})))
        {('fc1', 'input'): 10}
    """
    amax, lost = grid.of("amax"), grid.of("nan") + grid.of("inf")
    is_zero = (amax == 0) & ~(lost > 0)
    is_other = ~is_zero & ~(np.isnan(amax) & ~(lost > 0))
    behind = ~np.logical_or.accumulate(is_other[:, ::-1], axis=1)[:, ::-1]
    zeros = is_zero & behind
    keys = list(grid.tensors.select("layer", "role").iter_rows())
    return {keys[i]: int(grid.steps[np.argmax(zeros[i])]) for i in np.flatnonzero(zeros.any(axis=1)).tolist()}
