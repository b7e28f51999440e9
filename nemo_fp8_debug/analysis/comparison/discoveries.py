"""Of many tensors a few are out of the band by chance: which can be believed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

#: share of the tensors that are told to be out, which may be so by chance
RATE = 0.01
#: chance that a tensor of a run that goes well is out at all, and by how much its logarithm falls with the excess: no less
#: than in pairs of the benchmark's clean runs (`scripts/validation/fault_injection/false_discoveries.py`)
CHANCE, FALLS = 4e-4, 6.0


def discoveries(rows: pl.DataFrame, tensors: int) -> pl.DataFrame:
    """The rows of tensors that are out by more than chance lets one of so many be (Benjamini and Hochberg, JRSS B 57, 1995).

    NaN and infinity are no chance.

    Args:
        rows: layer, role, metric and excess of what is out.
        tensors: that were looked at, the others included.

    Example:
        >>> rows = pl.DataFrame({"layer": ["fc1"], "role": ["input"], "metric": ["underflow_pct"], "excess": [1.6]})
        >>> len(discoveries(rows, 60)), len(discoveries(rows, 6000))
        (1, 0)
    """
    if rows.is_empty():
        return rows
    each = rows.group_by("layer", "role", maintain_order=True).agg(
        pl.col("excess").max(), sure=(pl.col("metric") == "nonfinite").any()
    )
    chances = np.minimum(CHANCE * np.exp(-FALLS * (each["excess"].to_numpy() - 1)), 1.0)
    chances[each["sure"].to_numpy()] = 0.0
    kept = each.filter(pl.Series(chances <= highest_chance(chances, max(tensors, len(each))))).select("layer", "role")
    return rows.join(kept, on=["layer", "role"], how="semi", maintain_order="left")


def highest_chance(chances: npt.NDArray[np.float64], of: int) -> float:
    """The highest of some chances that is still a discovery; -1 if none is.

    `scipy.stats.false_discovery_control` would do the same, but importing `scipy.stats` takes half a second.

    Args:
        chances: those that are below 1.
        of: how many there are with the others.
    """
    ascending = np.sort(chances)
    found = np.flatnonzero(ascending <= RATE * np.arange(1, len(ascending) + 1) / of)
    return float(ascending[found[-1]]) if len(found) else -1.0
