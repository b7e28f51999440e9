"""How each operand is cast most of the time."""

from __future__ import annotations

import polars as pl

from ...core.keys import MIXED
from ...core.scale_sources import ENGINE
from .grid import KEY
from .metrics import Metrics


def usual_casts(metrics: Metrics) -> pl.DataFrame:
    """layer, role, recipe (that it has most often, null if none is known), cast (whether it is cast most of the time).

    Example:
        >>> rows = {"step": [0, 1, 2], "layer": "fc1", "role": "input", "recipe": ["mxfp8", "mxfp8", None]}
        >>> usual_casts(Metrics.of(pl.DataFrame(rows | {"scale_source": "engine"}))).row(0)
        ('fc1', 'input', 'mxfp8', True)
    """
    by = ("tensor", "recipe", "scale_source")
    counts = metrics.gathered(by[1:], lambda rows: rows.group_by(by, maintain_order=True).agg(pl.sum("count")))
    casts = counts.with_columns(cast=pl.col("scale_source").is_in([ENGINE, MIXED]))
    recipes, cast = _most_often(casts.drop_nulls("recipe"), "recipe"), _most_often(casts, "cast", last=True)
    return metrics.named(cast.join(recipes, on="tensor", how="left").sort("tensor")).select(*KEY, "recipe", "cast")


def _most_often(counts: pl.DataFrame, column: str, last: bool = False) -> pl.DataFrame:
    """tensor and the value that it has most often; of several the first, or the last, in their order."""
    of_values = counts.group_by("tensor", column).agg(pl.sum("count"))
    ordered = of_values.sort("count", column, descending=[True, last])
    return ordered.unique("tensor", keep="first", maintain_order=True).select("tensor", column)
