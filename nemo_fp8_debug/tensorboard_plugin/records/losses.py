"""What the loss did: few enough points to draw, with every spike among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ...analysis.loss.curve import LossCurve
from ...errors import hearing
from ...record.reader import read_table
from ...record.storage import Storage
from ..web.json_values import numbers

SERIES = ("loss", "grad_norm", "lr")
#: points that are drawn at most, and marks of a kind
_POINTS, _MARKS = 4000, 1000
#: standard deviations above the running median that make a spike
_SIGMAS = 5.0
#: losses before, of which a spike stands above the least as well
_BEFORE = 3


def loss(run: Storage) -> dict[str, Any]:
    """Loss, gradient norm and learning rate by step, thinned, with triggers, skipped steps and spikes.

    A value is null where it was not recorded, and where it is NaN or infinite: `not_finite` has the steps of these by name.
    """
    with hearing():
        table = read_table(run, "steps", ["step", *SERIES, "skipped", "trigger"]).unique("step", keep="last").sort("step")
    values = {name: table[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in SERIES}
    recorded = {name: table[name].is_not_null().to_numpy() for name in SERIES}
    kept = thinned(list(values.values()), _POINTS, list(recorded.values()))
    steps = table["step"].to_numpy()[kept]
    triggers = table.filter(pl.col("trigger").is_not_null()).select("step", "trigger")
    skipped = table.filter(pl.col("skipped").fill_null(0) != 0)["step"]
    return {
        "step": steps.tolist(),
        **{name: numbers(column[kept]) for name, column in values.items()},
        "not_finite": {
            name: steps[recorded[name][kept] & ~np.isfinite(column[kept])].tolist() for name, column in values.items()
        },
        "triggers": [list(row) for row in triggers.tail(_MARKS).rows()],
        "skipped": skipped.tail(_MARKS).to_list(),
        "spikes": _spikes(table),
    }


def _spikes(table: pl.DataFrame) -> list[int]:
    """Steps where the loss jumps up, the highest where they are many; a loss that is not finite is one."""
    curve = LossCurve.of(table)
    if not len(curve.steps):
        return []
    before = pl.Series(curve.losses).fill_nan(None).shift(1).rolling_min(_BEFORE, min_samples=1).to_numpy().copy()
    before[0] = np.inf
    with np.errstate(invalid="ignore"):
        # Of a loss that falls fast, as at the start, all stand above the median of their neighbors.
        above = np.nan_to_num(curve.losses - np.fmax(curve.smooth, before), nan=0.0, posinf=np.inf)
    high = np.flatnonzero(above > _SIGMAS * curve.scatter)
    highest = high[np.argsort(-above[high], kind="stable")[:_MARKS]]
    return sorted(curve.steps[highest].tolist())


def thinned(
    series: Sequence[npt.NDArray[np.float64]], points: int, known: Sequence[npt.NDArray[np.bool_]] = ()
) -> npt.NDArray[np.int64]:
    """Places to keep, ascending: of each of many equal stretches where each series is least, greatest and not finite.

    Args:
        series: of equal length N.
        points: to keep at the most.
        known: bool [N] each: places that have a value, finite or not; all by default.
    """
    n = len(series[0])
    if n <= points:
        return np.arange(n)
    buckets = max(1, (points - 2) // (3 * len(series)))
    bounds = np.linspace(0, n, buckets + 1).astype(np.int64)
    kept = {0, n - 1}
    for values, there in zip_longest(series, known):
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            places = np.arange(begin, end) if there is None else begin + np.flatnonzero(there[begin:end])
            kept.update(_extremes(values, places))
    return np.array(sorted(kept))


def _extremes(values: npt.NDArray[np.float64], places: npt.NDArray[np.int64]) -> set[int]:
    is_finite = np.isfinite(values[places])
    finite, lost = places[is_finite], places[~is_finite]
    found = {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])} if len(finite) else set()
    if len(finite) and len(lost):
        found.add(int(lost[0]))
    return found
