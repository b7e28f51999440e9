"""Since when a tensor of a run is out of the band of a good one, and by what.

The band of a figure is its running median in the good run, give or take what it moves by from sample to sample. A tensor is
out from the first of several samples in a row that lie beyond the band on the bad side. Figures are those that do not depend
on the size of values, on scales on which equal steps mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from ..sample import SHOWN_AS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A figure by which a tensor can be out of the band."""

    figure: str
    #: to a scale on which equal steps mean the same
    scaled: Callable[[Floats], Floats]
    #: the least rise on that scale that counts, however steady the good run is
    least: float
    #: whether it is what a loss of precision looks like, and counts only where more is lost
    of_error: bool = False


def _linear(x: Floats) -> Floats:
    return x


def _log2_of_error(x: Floats) -> Floats:
    """What is below 1% is rounding."""
    result: Floats = np.log2(np.maximum(x, 0.01))
    return result


#: in the order in which one explains the next: a stale scale clips, and clipping is an error
EVIDENCE = (
    Evidence("nonfinite", _linear, 0.5),
    Evidence("scale_ratio_log2", _linear, 1.0),
    Evidence("overflow_pct", _linear, 0.01),
    Evidence("underflow_pct", _linear, 1.0, True),
    Evidence("relative_error", _log2_of_error, 0.585, True),  # half as much again
    Evidence("outlier_log2", _linear, 2.0, True),
)
#: spreads of the good run that count
SPREADS = 6.0
#: samples in a row that count
IN_A_ROW = 3
#: log2 of the rise of the MSE that makes it more: half as much again
_MORE_LOST = 0.585
#: samples of the good run that a running median is taken over, on either side
_HALF = 4


def onsets(good: pl.DataFrame, bad: pl.DataFrame) -> pl.DataFrame:
    """When each tensor that both runs have left the good run's band.

    Args:
        good: `figures` table; steps need not be those of `bad`, but only steps that both runs cover are looked at.
        bad: likewise.

    Returns:
        A row for each figure of a tensor that is out: layer, role, tensor (as people write the role), figure, onset (step),
        excess (how many times the least rise that counts, a median over the samples that made the onset), value and expected
        (of the figure at the onset; a running median of the good run). Earliest first, then strongest.
    """
    keys = good.select(_KEY).unique(maintain_order=True).join(bad.select(_KEY).unique(), on=_KEY)
    pair = _Pair(_Grid(good, keys), _Grid(bad, keys))
    found = [row for evidence in EVIDENCE for row in _out(evidence, keys, pair)]
    return pl.DataFrame(found, schema=_SCHEMA, orient="row").sort("onset", -pl.col("excess"), maintain_order=True)


_KEY = ["layer", "role"]
_SCHEMA: Mapping[str, type[pl.DataType]] = {
    "layer": pl.String,
    "role": pl.String,
    "tensor": pl.String,
    "figure": pl.String,
    "onset": pl.Int64,
    "excess": pl.Float64,
    "value": pl.Float64,
    "expected": pl.Float64,
}


class _Grid:
    """Figures of a run by tensor and step."""

    def __init__(self, figures: pl.DataFrame, keys: pl.DataFrame) -> None:
        self._shape = len(keys), figures["step"].n_unique()
        nonfinite = (pl.col("nan") + pl.col("inf") > 0).cast(pl.Float64)
        self._rows = figures.join(keys.with_row_index("row"), on=_KEY).with_columns(nonfinite=nonfinite)
        steps = figures["step"].unique().sort()
        #: int64 [S]
        self.steps = steps.to_numpy()
        self._place = self._rows["row"].to_numpy(), steps.search_sorted(self._rows["step"]).to_numpy()

    def of(self, figure: str) -> Floats:
        """[T, S], NaN where there is none."""
        values = np.full(self._shape, np.nan)
        values[self._place] = self._rows[figure].cast(pl.Float64).to_numpy()
        return values


class _Pair:
    """Two runs over the same tensors, and the steps of the bad one that the good one covers."""

    def __init__(self, good: _Grid, bad: _Grid) -> None:
        self._good, self._bad = good, bad
        self._kept: dict[str, Floats] = {}  # of one figure at a time: they are large
        self._covered = bad.steps <= max(good.steps, default=-1)
        #: int64 [S]
        self.steps = bad.steps[self._covered]
        expected, found = self.of("mse")
        with np.errstate(divide="ignore", invalid="ignore"):
            #: [T, S]: whether more is lost than in the good run; less is in a gradient that vanishes behind the culprit
            self.loses_more = np.log2(found) - np.log2(expected) > _MORE_LOST

    def of(self, figure: str) -> tuple[Floats, Floats]:
        """The median of the good run at the bad one's steps, and the bad one's values; [T, S] each."""
        medians, steps = self._medians(figure), self._good.steps
        expected = np.full((len(medians), len(self.steps)), np.nan)
        for i, of_one in enumerate(medians):
            if (known := ~np.isnan(of_one)).any():
                expected[i] = np.interp(self.steps, steps[known], of_one[known])
        return expected, self._bad.of(figure)[:, self._covered]

    def _medians(self, figure: str) -> Floats:
        if figure not in self._kept:
            self._kept = {figure: running_median(self._good.of(figure))}
        return self._kept[figure]

    def highest(self, figure: str) -> Floats:
        """[T, S]: the largest value of the good run at the samples around each of the bad one's steps."""
        values, steps = self._good.of(figure), self._good.steps
        right = np.clip(np.searchsorted(steps, self.steps), 0, max(len(steps) - 1, 0))
        around = [np.clip(right + by, 0, max(len(steps) - 1, 0)) for by in (-2, -1, 0, 1)]
        largest = values[:, around[0]] if len(steps) else np.full((len(values), len(self.steps)), np.nan)
        for at in around[1:] if len(steps) else ():
            largest = np.fmax(largest, values[:, at])
        return largest

    def spread(self, evidence: Evidence) -> Floats:
        """[T]: what the good run's figure moves by around its median, as a standard deviation."""
        values = self._good.of(evidence.figure)
        apart = np.abs(evidence.scaled(values) - evidence.scaled(self._medians(evidence.figure)))
        return np.nan_to_num(1.4826 * _median(apart))


def _out(evidence: Evidence, keys: pl.DataFrame, pair: _Pair) -> Iterator[tuple[str | int | float, ...]]:
    """Rows of the tensors that are out by one figure."""
    expected, found = pair.of(evidence.figure)
    limit = np.maximum(evidence.least, SPREADS * pair.spread(evidence))
    # What the good run does at these very steps is usual too, a transient that its median knows nothing of.
    usual = evidence.scaled(np.fmax(expected, pair.highest(evidence.figure)))
    excess = (evidence.scaled(found) - usual) / limit[:, None]
    out = (excess > 1) & (pair.loses_more | (not evidence.of_error))
    needed = 1 if evidence.figure == "nonfinite" else IN_A_ROW
    for i, (layer, role) in enumerate(keys.rows()):
        start = _first_of_several(out[i], needed)
        if start is not None:
            strength = float(np.median(excess[i, start : start + needed]))
            row = (layer, role, SHOWN_AS[role], evidence.figure, int(pair.steps[start]), strength)
            yield (*row, float(found[i, start]), float(expected[i, start]))


def running_median(values: Floats) -> Floats:
    """[T, S] -> [T, S]: over `_HALF` samples on either side, windows as wide at either end as in the middle."""
    n = values.shape[1]
    width = min(n, 2 * _HALF + 1)
    if n == 0:
        return values
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)
    medians = _median(windows)
    start = np.clip(np.arange(n) - _HALF, 0, n - width)
    result: Floats = medians[:, start]
    return result


def _median(values: Floats) -> Floats:
    """Over the last axis, NaN left out, the lower of two in the middle; NaN where there is nothing else."""
    if values.shape[-1] == 0:
        return np.full(values.shape[:-1], np.nan)
    if not np.isnan(values).any():
        middle_of_all = (values.shape[-1] - 1) // 2
        whole: Floats = np.partition(values, middle_of_all, axis=-1)[..., middle_of_all]
        return whole
    ordered = np.sort(values, axis=-1)  # NaN last
    count = (~np.isnan(values)).sum(-1)
    middle = np.maximum(count - 1, 0) // 2
    result: Floats = np.take_along_axis(ordered, middle[..., None], -1)[..., 0]
    return result


def _first_of_several(out: npt.NDArray[np.bool_], needed: int) -> int | None:
    """Where the first `needed` in a row begin."""
    if len(out) < needed:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(out, needed).all(-1)
    return int(np.argmax(runs)) if runs.any() else None
