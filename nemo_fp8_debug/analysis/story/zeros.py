"""Since when all values of a tensor are zero: what the format loses of it tells nothing then."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...core.keys import Key
from ..diagnosis.rules.zeros import is_zero
from ..runs.blocks import in_parts, over_blocks
from ..runs.grid import Grid
from ..runs.metrics import Metrics


def zero_since(metrics: Metrics) -> dict[Key, int]:
    """By tensor, the first sample from which on all its values are zero, to the end; others are left out.

    Example:
        >>> import polars as pl
        >>> rows = {"step": [0, 10, 20], "layer": ["fc1"] * 3, "role": ["input"] * 3, "amax": [0.5, 0.0, 0.0]}
        >>> zero_since(Metrics.of(pl.DataFrame(rows | {"nan": [0] * 3, "inf": [0] * 3})))
        {('fc1', 'input'): 10}
    """
    if metrics.is_empty():
        return {}
    found = over_blocks(partial(in_parts, _zero_since), metrics, together=[("amax", "nonfinite")])
    return {key: step for of_block in found for of_part in of_block for key, step in of_part}


def _zero_since(grid: Grid) -> list[tuple[Key, int]]:
    zero = is_zero(grid)
    is_other = ~zero & ~(np.isnan(grid.metric("amax")) & ~(grid.metric("nonfinite") > 0))
    behind = ~np.logical_or.accumulate(is_other[:, ::-1], axis=1)[:, ::-1]
    zeros = zero & behind
    keys = list(grid.tensors.iter_rows())
    return [(keys[i], int(grid.steps[np.argmax(zeros[i])])) for i in np.flatnonzero(zeros.any(axis=1)).tolist()]
