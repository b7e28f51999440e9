"""How each operand is cast most of the time."""

from __future__ import annotations

import numpy as np
import polars as pl

from ...core.keys import MIXED
from ...core.scale_sources import ENGINE
from .grid import Ints
from .metrics import Metrics


def usual_casts(metrics: Metrics) -> pl.DataFrame:
    """layer, role, recipe (that it has most often, null if none is known), cast (whether it is cast most of the time).

    Example:
        >>> rows = {"step": [0, 1, 2], "layer": "fc1", "role": "input", "recipe": ["mxfp8", "mxfp8", None]}
        >>> usual_casts(Metrics.of(pl.DataFrame(rows | {"scale_source": "engine"}))).row(0)
        ('fc1', 'input', 'mxfp8', True)
    """
    recipes, sources = metrics.counts("recipe"), metrics.counts("scale_source")
    none = np.zeros(len(metrics.tensors), dtype=np.int64)
    cast = sum((counts for source, counts in sources.items() if source in (ENGINE, MIXED)), none)
    is_cast = 2 * cast >= sum(sources.values(), none)
    return metrics.tensors.with_columns(recipe=_most_often(recipes, none), cast=pl.Series(is_cast, dtype=pl.Boolean))


def _most_often(counts: dict[str | None, Ints], none: Ints) -> pl.Series:
    """Of each operand; of several the first in their order."""
    names = sorted(name for name in counts if name is not None)
    by_name = np.stack([none, *(counts[name] for name in names)])
    most = by_name.argmax(axis=0)  # 0: it has none
    return pl.Series([None, *names], dtype=pl.String).gather(most)
