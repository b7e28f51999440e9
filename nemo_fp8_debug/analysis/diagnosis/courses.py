"""Since when a number of a layer is far from what is usual: what rules about activations and states have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from .. import thresholds
from ..runs.grid import Floats, Ints


@dataclass(frozen=True)
class LayerCourse:
    """A number of one layer, sample by sample."""

    layer: str
    #: int64 [S], ascending
    steps: Ints
    #: float64 [S], none of them NaN
    values: Floats
    #: float64: the baseline's values, or without a baseline those of the beginning; not empty
    usual: Floats
    #: index of the first sample that can be judged
    first: int

    def since(self, out: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
        """Index of the first sample that is out together with the one after it, or as the last one; None: there is none."""
        judged = out.copy()
        judged[: self.first] = False
        lasts = judged & np.append(judged[1:], True)
        if len(judged) < thresholds.IN_A_ROW or not lasts.any():
            return None
        return int(np.argmax(lasts))

    def begin(self, out: int) -> int:
        """Return the first sample from which values stay above all that is usual, up to one that is out."""
        within = np.flatnonzero(self.values[:out] <= self.usual.max())
        return max(int(within[-1]) + 1 if len(within) else 0, self.first)


def measure_courses(rows: pl.DataFrame, baseline: pl.DataFrame | None, metric: str) -> list[LayerCourse]:
    """Of each layer that has samples enough, in the order of the table.

    Args:
        rows: step, layer and `metric`, of one role.
        baseline: likewise; None: there is none.

    Example:
        >>> rows = pl.DataFrame({"step": range(12), "layer": ["a"] * 12, "amax": [1.0] * 8 + [9.0] * 4})
        >>> (course,) = measure_courses(rows, None, "amax")
        >>> course.usual.max(), course.since(course.values > 4)
        (1.0, 8)
    """
    found = []
    for (layer,), of_layer in _known(rows, metric).group_by("layer", maintain_order=True):
        steps, values = of_layer["step"].to_numpy(), of_layer[metric].to_numpy()
        if baseline is not None:
            usual, first = _known(baseline.filter(layer=layer), metric)[metric].to_numpy(), 0
        else:
            first = round(len(values) * thresholds.BEGINNING)
            usual = values[:first] if first >= thresholds.FEW else values[:0]
        if len(usual):
            found.append(LayerCourse(str(layer), steps, values, usual, first))
    return found


def _known(rows: pl.DataFrame, metric: str) -> pl.DataFrame:
    return rows.filter(pl.col(metric).is_not_null() & pl.col(metric).is_not_nan()).sort("step", maintain_order=True)
