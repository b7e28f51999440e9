"""Since when a tensor of a run is out of the band of a good one, and by what.

The band of a figure is its running median in the good run, give or take what it moves by from sample to sample. A tensor is
out from the first of several samples in a row that lie beyond the band on the bad side. Figures are those that do not depend
on the size of values, on scales on which equal steps mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import polars as pl

from ...core.keys import SHOWN_AS
from ..runs.grid import Floats, Grid, in_common, lower_median


@dataclass(frozen=True)
class Evidence:
    """A figure by which a tensor can be out of the band."""

    figure: str
    #: the least rise that counts, however steady the good run is; on a log2 scale where `log2`
    least: float
    #: whether it is what a loss of precision looks like, and counts only where more is lost
    of_error: bool = False
    #: whether equal ratios mean the same, and not equal differences; what is below 1% is rounding
    log2: bool = False

    def scaled(self, x: Floats) -> Floats:
        """To a scale on which equal steps mean the same."""
        return np.log2(np.maximum(x, _ROUNDING)) if self.log2 else x

    def unscaled(self, x: Floats) -> Floats:
        """Back from it."""
        return np.exp2(x) if self.log2 else x


_ROUNDING = 0.01
#: in the order in which one explains the next: a stale scale clips, and clipping is an error
EVIDENCE = (
    Evidence("nonfinite", 0.5),
    Evidence("scale_ratio_log2", 1.0),
    Evidence("overflow_pct", 0.01, of_error=True),
    Evidence("underflow_pct", 1.0, of_error=True),
    Evidence("relative_error", 0.585, of_error=True, log2=True),  # half as much again
    Evidence("outlier_log2", 2.0, of_error=True),
)
#: spreads of the good run that count
SPREADS = 6.0
#: samples in a row that count
IN_A_ROW = 3
#: log2 of the rise of the MSE that makes it more: half as much again
_MORE_LOST = 0.585
#: samples of the good run that a running median is taken over, on either side
_HALF = 4
#: tensors whose medians are taken at once, few enough for the cache
_BLOCK = 16
_EXCHANGES = (
    *((1, 2), (4, 5), (7, 8), (0, 1), (3, 4), (6, 7), (1, 2), (4, 5), (7, 8), (0, 3)),
    *((5, 8), (4, 7), (3, 6), (1, 4), (2, 5), (4, 7), (4, 2), (6, 4), (4, 2)),
)


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
    return onsets_of(Grid.of_table(good), Grid.of_table(bad))


def onsets_of(good: Grid, bad: Grid) -> pl.DataFrame:
    """The same of runs that have been laid out."""
    pair = _Pair(*in_common(good, bad))
    found = [row for evidence in EVIDENCE for row in _out(evidence, pair)]
    return pl.DataFrame(found, schema=_SCHEMA, orient="row").sort("onset", -pl.col("excess"), maintain_order=True)


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


class _Pair:
    """Two runs over the same tensors, and the steps of the bad one that the good one covers."""

    def __init__(self, good: Grid, bad: Grid) -> None:
        #: layer, role
        self.tensors = good.tensors
        self._good = good
        self._kept: dict[str, tuple[Floats, Floats]] = {}  # of one figure at a time: they are large
        covered = min(good.steps, default=0), max(good.steps, default=-1)
        self._bad = bad.at(np.flatnonzero((bad.steps >= covered[0]) & (bad.steps <= covered[1])))
        #: int64 [S]
        self.steps = self._bad.steps
        expected, found = self.of("mse")
        with np.errstate(divide="ignore", invalid="ignore"):
            #: [T, S]: whether more is lost than in the good run; less is in a gradient that vanishes behind the culprit
            self.loses_more = np.log2(found) - np.log2(expected) > _MORE_LOST

    def of(self, figure: str) -> tuple[Floats, Floats]:
        """The median of the good run at the bad one's steps, and the bad one's values; [T, S] each."""
        medians, steps = self._of_good(figure)[1], self._good.steps
        found = self._bad.of(figure)
        if np.array_equal(steps, self.steps) and not np.isnan(medians).any():
            return medians, found
        expected = np.full((len(medians), len(self.steps)), np.nan)
        for i, of_one in enumerate(medians):
            if (known := ~np.isnan(of_one)).any():
                expected[i] = np.interp(self.steps, steps[known], of_one[known])
        return expected, found

    def _of_good(self, figure: str) -> tuple[Floats, Floats]:
        """Values and running medians."""
        if figure not in self._kept:
            values = self._good.of(figure)
            self._kept = {figure: (values, running_median(values))}
        return self._kept[figure]

    def highest(self, figure: str) -> Floats:
        """[T, S]: the largest value of the good run at the samples around each of the bad one's steps."""
        values, steps = self._of_good(figure)[0], self._good.steps
        if not len(steps):
            return np.full((len(values), len(self.steps)), np.nan)
        around = np.pad(values, ((0, 0), (2, 1)), mode="edge")
        largest = reduce(np.fmax, [around[:, by : by + len(steps)] for by in range(4)])
        at: Floats = largest[:, np.clip(np.searchsorted(steps, self.steps), 0, len(steps) - 1)]
        return at

    def spread(self, evidence: Evidence) -> Floats:
        """[T]: what the good run's figure moves by around its median, as a standard deviation."""
        values, medians = self._of_good(evidence.figure)
        apart = np.abs(evidence.scaled(values) - evidence.scaled(medians))
        return np.nan_to_num(1.4826 * lower_median(apart))


def band(good: pl.DataFrame, bad: pl.DataFrame, layer: str, role: str, figure: str) -> pl.DataFrame:
    """What decides whether a tensor is out: step, found, expected (running median of the good run), limit (above which it is
    out), at the bad run's steps."""
    evidence = next(e for e in EVIDENCE if e.figure == figure)
    rows = (Grid.of_table(run.filter(layer=layer, role=role)) for run in (good, bad))
    pair = _Pair(*in_common(*rows))
    expected, found = pair.of(figure)
    limit = evidence.unscaled(_usual(evidence, expected, pair) + _least_rise(evidence, pair)[:, None])
    columns = {"found": found, "expected": expected, "limit": limit}
    return pl.DataFrame({"step": pair.steps} | {name: values.reshape(-1) for name, values in columns.items()})


def _least_rise(evidence: Evidence, pair: _Pair) -> Floats:
    """[T]: that counts."""
    return np.maximum(evidence.least, SPREADS * pair.spread(evidence))


def _usual(evidence: Evidence, expected: Floats, pair: _Pair) -> Floats:
    """[T, S]: what the good run does at these very steps is usual too, a transient that its median knows nothing of."""
    return evidence.scaled(np.fmax(expected, pair.highest(evidence.figure)))


def _out(evidence: Evidence, pair: _Pair) -> Iterator[tuple[str | int | float, ...]]:
    """Rows of the tensors that are out by one figure."""
    expected, found = pair.of(evidence.figure)
    excess = evidence.scaled(found) - _usual(evidence, expected, pair)
    excess /= _least_rise(evidence, pair)[:, None]
    out = (excess > 1) & (pair.loses_more | (not evidence.of_error))
    needed = 1 if evidence.figure == "nonfinite" else IN_A_ROW
    for i in np.flatnonzero(out.sum(axis=1) >= needed):
        start = _first_of_several(out[i], needed)
        if start is not None:
            layer, role = pair.tensors.row(int(i))
            strength = float(np.median(excess[i, start : start + needed]))
            row = (layer, role, SHOWN_AS[role], evidence.figure, int(pair.steps[start]), strength)
            yield (*row, float(found[i, start]), float(expected[i, start]))


def running_median(values: Floats) -> Floats:
    """[T, S] -> [T, S]: over `_HALF` samples on either side, windows as wide at either end as in the middle."""
    n = values.shape[1]
    width = min(n, 2 * _HALF + 1)
    if n == 0:
        return values
    medians = np.concatenate([_medians_of_windows(values[i : i + _BLOCK], width) for i in range(0, len(values), _BLOCK)])
    result: Floats = medians[:, np.clip(np.arange(n) - _HALF, 0, n - width)]
    return result


def _medians_of_windows(values: Floats, width: int) -> Floats:
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)
    if width != 9:
        return lower_median(windows)
    medians = _median_of_9([windows[..., i] for i in range(width)])
    holes = np.isnan(medians)  # each value bears on the median, so NaN anywhere in a window shows
    if holes.any():
        medians[holes] = lower_median(windows[holes])
    return medians


def _median_of_9(values: list[Floats]) -> Floats:
    """By exchanges that bring the median into the middle, for all windows at once (Paeth, Median Finding on a 3x3 Grid, in
    Graphics Gems, 1990)."""
    v = list(values)
    for a, b in _EXCHANGES:
        v[a], v[b] = np.minimum(v[a], v[b]), np.maximum(v[a], v[b])
    return v[4]


def _first_of_several(out: npt.NDArray[np.bool_], needed: int) -> int | None:
    """Where the first `needed` in a row begin."""
    if len(out) < needed:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(out, needed).all(-1)
    return int(np.argmax(runs)) if runs.any() else None
