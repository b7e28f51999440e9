"""Since when all values of a tensor are zero: what the format loses of it tells nothing then."""

from __future__ import annotations

import polars as pl

from ...core.keys import Key

_KEY = ["layer", "role"]


def zero_since(metrics: pl.DataFrame) -> dict[Key, int]:
    """By tensor, the first sample from which on all its values are zero, to the end.

    Args:
        metrics: of a run, with step, layer, role, amax, nan and inf.

    Example:
        >>> rows = {"step": [0, 10, 20], "layer": ["fc1"] * 3, "role": ["input"] * 3, "amax": [0.5, 0.0, 0.0]}
        >>> zero_since(pl.DataFrame(rows | {"nan": [0] * 3, "inf": [0] * 3}))
        {('fc1', 'input'): 10}
    """
    is_zero = (pl.col("amax") == 0) & (pl.col("nan") + pl.col("inf") == 0)
    rows = metrics.filter(pl.col("amax").is_not_null()).select(*_KEY, "step", zero=is_zero)
    last = rows.filter(~pl.col("zero")).group_by(_KEY).agg(last=pl.col("step").max())
    zeros = rows.filter("zero").join(last, on=_KEY, how="left").filter(pl.col("step") > pl.col("last").fill_null(-1))
    return {(layer, role): step for layer, role, step in zeros.group_by(_KEY).agg(pl.col("step").min()).iter_rows()}
