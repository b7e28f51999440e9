"""What no healthy operand does, whatever the run: the only evidence against an operand of a run that has no baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from ...runs.grid import Floats, Grid

#: samples at the beginning that are left out: scales are still made up
_FIRST = 2
#: how many times a limit a single sample must show
_FAR = 3.0
#: by role, bits that the scale in use is off, and percent of values that underflow and overflow, beyond which an operand is
#: not healthy; an order of magnitude, or 2 bits, above all clean runs of `scripts/validation/fault_injection`. Operands
#: of attention have no limits so far
LIMITS = {
    "input": {"scale": 3.0, "underflow": 8.0, "overflow": 3.0},
    "weight": {"scale": 3.0, "underflow": 4.0, "overflow": 2.0},
    "grad_output": {"scale": 8.0, "underflow": 25.0, "overflow": 3.0},
}


def beyond(metrics: pl.DataFrame) -> pl.DataFrame:
    """Operands that are beyond these limits for two samples in a row, or far beyond them in one.

    Args:
        metrics: `metrics` table.

    Returns:
        layer, role, onset (step), excess (how many times a limit); the earliest first. The first samples, whose scales are
        made up, count only if what follows them is beyond too.

    Example:
        >>> nothing = {"layer": ["fc1"] * 5, "role": ["weight"] * 5, "underflow_pct": [0.0] * 5, "overflow_pct": [0.0] * 5}
        >>> off = pl.DataFrame(nothing | {"step": [0, 5, 10, 15, 20], "scale_ratio_log2": [9.0, 0, 0, 7, 7]})
        >>> beyond(off).row(0)
        ('fc1', 'weight', 15, 2.3333333333333335)
    """
    grid = Grid.of_table(metrics)
    times = _times(grid)
    after = np.concatenate([times[:, 1:], np.zeros((len(times), 1))], axis=1)[:, : times.shape[1]]
    strength = np.fmax(np.fmin(times, after), times / _FAR)
    found = []
    for i in np.flatnonzero((strength[:, _FIRST:] > 1).any(axis=1)):
        at = first = _FIRST + int(np.argmax(strength[i, _FIRST:] > 1))
        while at > 0 and times[i, at - 1] > 1:
            at -= 1
        layer, role = grid.tensors.row(int(i))
        found.append((layer, role, int(grid.steps[at]), float(strength[i, first])))
    schema = {"layer": pl.String, "role": pl.String, "onset": pl.Int64, "excess": pl.Float64}
    return pl.DataFrame(found, schema=schema, orient="row").sort("onset", -pl.col("excess"), maintain_order=True)


def _times(grid: Grid) -> Floats:
    """[T, S]: how many times each limit an operand shows; 0 where it has no row."""
    columns = {"scale": "scale_ratio_log2", "underflow": "underflow_pct", "overflow": "overflow_pct"}
    roles = grid.tensors["role"].to_list()
    shown = [np.abs(grid.of(column)) / _limits(name, roles)[:, None] for name, column in columns.items()]
    times: Floats = np.nan_to_num(np.fmax.reduce(shown), posinf=np.inf)
    return times


def _limits(name: str, roles: Sequence[str]) -> Floats:
    """[T]; NaN where a role has none."""
    return np.array([LIMITS[role][name] if role in LIMITS else np.nan for role in roles])
