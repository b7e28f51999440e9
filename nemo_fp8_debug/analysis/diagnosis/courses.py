"""Find when a metric of a layer leaves its usual range, for rules about activations and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from .. import thresholds
from ..runs.grid import Floats, Ints


@dataclass(frozen=True)
class LayerTimeline:
    """One metric of one layer over all samples."""

    layer: str
    #: sampled steps, int64 [S], ascending
    steps: Ints
    #: values, float64 [S], without NaN
    values: Floats
    #: usual values, float64, not empty: from the baseline, or from the beginning of the run
    usual: Floats
    #: index of the first sample that can be checked
    first: int

    def find_lasting_exit(self, out: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
        """Return the first index from which two consecutive samples are True in `out`, or None if there is no such index. At
        the last sample, a single True is enough.
        """
        judged = out.copy()
        judged[: self.first] = False
        lasts = judged & np.append(judged[1:], True)
        if len(judged) < thresholds.IN_A_ROW or not lasts.any():
            return None
        return int(np.argmax(lasts))

    def find_rise_start(self, out: int) -> int:
        """Return the index from which the values stay above all usual values, up to the sample `out`."""
        within = np.flatnonzero(self.values[:out] <= self.usual.max())
        return max(int(within[-1]) + 1 if len(within) else 0, self.first)


def build_layer_timelines(rows: pl.DataFrame, baseline: pl.DataFrame | None, metric: str) -> list[LayerTimeline]:
    """Return the course of each layer that has enough samples, in the order of the table.

    Args:
        rows: a table with the columns step, layer and `metric`, for one role.
        baseline: the same columns of the baseline, or None.

    Example:
        >>> rows = pl.DataFrame({"step": range(12), "layer": ["a"] * 12, "amax": [1.0] * 8 + [9.0] * 4})
        >>> (course,) = build_layer_timelines(rows, None, "amax")
        >>> course.usual.max(), course.find_lasting_exit(course.values > 4)
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
            found.append(LayerTimeline(str(layer), steps, values, usual, first))
    return found


def _known(rows: pl.DataFrame, metric: str) -> pl.DataFrame:
    return rows.filter(pl.col(metric).is_not_null() & pl.col(metric).is_not_nan()).sort("step", maintain_order=True)
