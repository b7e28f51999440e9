"""Since when a tensor of a run is out of the band of a baseline, and by what.

The band of a metric is its running median in the baseline, give or take what it moves by from sample to sample. A tensor is
out from the first of several samples in a row that lie beyond the band on the run side. Metrics are those that do not depend
on the size of values, on scales on which equal steps mean the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt
import polars as pl

from ...core.keys import SHOWN_AS
from ...core.threads import run_ahead
from ...numerics.limits import LEAST_VALUES
from ..runs.blocks import map_over_blocks
from ..runs.grid import Floats, Grid, Ints, lower_median
from ..runs.metrics import Metrics, select_common
from ..runs.source import Bools


@dataclass(frozen=True)
class Evidence:
    """A metric by which a tensor can be out of the band."""

    metric: str
    #: the least rise that counts, however steady the baseline is; on a log2 scale where `log2`
    least: float
    #: whether it is what a loss of precision looks like, and counts only where more is lost, or above `anyway`
    of_error: bool = False
    #: how many times the least rise counts even if no more is lost
    anyway: float = np.inf
    #: whether equal ratios mean the same, and not equal differences
    log2: bool = False
    #: what is less is rounding, on a log2 scale
    floor: float = 0.01
    #: scaled values below this count as this: they are all equally good
    good: float = -np.inf
    #: 1: a rise counts; -1: a fall
    sign: int = 1
    #: how many times the least rise a sample must show, to be told as a transient if fewer than three in a row do
    transient: float = 6.0
    #: values of a tensor that must be affected at least, where `least` is in percent of them
    least_values: int = 0
    #: part of what is usual that a rise must be at least: FP4 loses so much that its noise is points
    least_part: float = 0.0

    def least_of(self, usual: Floats) -> Floats:
        """The least rise that counts, above what is usual (scaled)."""
        least: Floats = np.fmax(self.least, self.least_part * usual)
        return least

    def scaled(self, x: Floats) -> Floats:
        """To a scale on which equal steps mean the same."""
        return np.maximum(self.sign * (np.log2(np.maximum(x, self.floor)) if self.log2 else x), self.good)

    def unscaled(self, x: Floats) -> Floats:
        """Back from it."""
        return np.exp2(self.sign * x) if self.log2 else self.sign * x


#: how many times the least rise counts against healthy operands of another model; of gradients more, which differ from task
#: to task
OF_OTHER_MODELS, OF_GRADIENTS = 2.0, 4.0
#: in the order in which one explains the next: a stale scale clips, and clipping is an error
EVIDENCE = (
    Evidence("nonfinite", 0.5),
    Evidence("scale_ratio_log2", 1.0, good=0.0),  # no value is clipped
    Evidence("scale_ratio_log2", 6.0, sign=-1, transient=2.0),
    Evidence("overflow_pct", 0.05, of_error=True, least_values=LEAST_VALUES, least_part=0.5),
    Evidence("underflow_pct", 1.0, of_error=True, least_part=0.5),
    Evidence("relative_error", 0.585, of_error=True, log2=True),  # half as much again
    Evidence("outlier_log2", 3.0, of_error=True, transient=3.0, anyway=2.5),
)


#: share of the tensors that are told to be out, which may be so by chance
RATE = 0.01
#: chance that a tensor of a run that goes well is out at all, and by how much its logarithm falls with the excess: no less
#: than in pairs of the benchmark's clean runs (`scripts/validation/fault_injection/false_discoveries.py`)
CHANCE, FALLS = 4e-4, 6.0


def select_discoveries(rows: pl.DataFrame, tensors: int) -> pl.DataFrame:
    """The rows of tensors that are out by more than chance lets one of so many be (Benjamini and Hochberg, JRSS B 57, 1995).

    NaN and infinity are no chance.

    Args:
        rows: layer, role, metric and excess of what is out.
        tensors: that were looked at, the others included.

    Example:
        >>> rows = pl.DataFrame({"layer": ["fc1"], "role": ["input"], "metric": ["underflow_pct"], "excess": [1.6]})
        >>> len(select_discoveries(rows, 60)), len(select_discoveries(rows, 6000))
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


#: of a tensor that is out; columns as of `_SCHEMA`
Row = tuple[str | int | float, ...]
#: spreads of the baseline that count
SPREADS = 6.0
#: samples of a baseline whose scales are still made up
FIRST = 2
#: samples in a row that count
IN_A_ROW = 3
#: log2 of the rise of the MSE that makes it more: half as much again
_MORE_LOST = 0.585
#: metrics that are read at once: a share of overflow needs the number of values, and the others follow one another
_TOGETHER = (("mse", "nonfinite"), ("overflow_pct", "n"), ("scale_ratio_log2",), ("underflow_pct", "relative_error"))
#: samples of the baseline that a running median is taken over, on either side
_HALF = 4
#: values whose medians are taken at once, few enough for the cache
_AT_ONCE = 1 << 14
_EXCHANGES = (
    *((1, 2), (4, 5), (7, 8), (0, 1), (3, 4), (6, 7), (1, 2), (4, 5), (7, 8), (0, 3)),
    *((5, 8), (4, 7), (3, 6), (1, 4), (2, 5), (4, 7), (4, 2), (6, 4), (4, 2)),
)


def find_onsets(baseline: Metrics, run: Metrics) -> pl.DataFrame:
    """When each tensor that both runs have left the baseline's band.

    Args:
        baseline: its steps need not be those of `run`, but only steps that both runs cover are looked at.
        run: likewise.

    Returns:
        A row for each metric of a tensor that is out: layer, role, tensor (as people write the role), metric, onset (step),
        samples (in a row that are out; a transient has fewer than 3), excess (how many times the least rise that counts, a
        median over the samples that made the onset), value and expected (of the metric at the onset; a running median of the
        baseline). Earliest first, then strongest. Of all tensors that are out, at most one in a hundred is so by chance
        (see `select_discoveries`).
    """
    both = select_common(baseline, run)
    found = map_over_blocks(_rows, *both, together=_TOGETHER)
    return select_discoveries(_in_order(found), len(both[0].tensors))


def list_onsets(baseline: Grid, run: Grid) -> pl.DataFrame:
    """The same of two runs over the same tensors, with what chance alone brings about."""
    return _in_order([_rows(baseline, run)])


def _rows(baseline: Grid, run: Grid) -> list[list[Row]]:
    """For each evidence, rows of the tensors that are out.

    Of all tensors only a metric or two can be held, so metrics come one after the other; of each, some tensors at a time.
    """

    def pair(some: slice, loses_more: Bools | None = None) -> Pair:
        return Pair(baseline.rows(some), run.rows(some), loses_more)

    parts = baseline.parts()
    masks = list(run_ahead(lambda some: pair(some).loses_more, parts))
    found: list[list[Row]] = []
    for _, of_metric in itertools.groupby(EVIDENCE, lambda evidence: evidence.metric):
        alike = list(of_metric)

        def out(of_part: tuple[slice, Bools], alike: list[Evidence] = alike) -> list[list[Row]]:
            here = pair(*of_part)
            return [list(_out(evidence, here)) for evidence in alike]

        of_parts = list(run_ahead(out, list(zip(parts, masks, strict=True))))
        found += [[row for rows in of_parts for row in rows[i]] for i in range(len(alike))]
    return found


def _in_order(found: Sequence[Sequence[Sequence[Row]]]) -> pl.DataFrame:
    """
    Args:
        found: rows by block of tensors and evidence.
    """
    rows = [row for of_evidence in zip(*found, strict=True) for of_block in of_evidence for row in of_block]
    table = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    return table.sort("onset", -pl.col("excess"), maintain_order=True)


_SCHEMA: Mapping[str, type[pl.DataType]] = {
    "layer": pl.String,
    "role": pl.String,
    "tensor": pl.String,
    "metric": pl.String,
    "onset": pl.Int64,
    "samples": pl.Int64,
    "excess": pl.Float64,
    "value": pl.Float64,
    "expected": pl.Float64,
}


class Pair:
    """Two runs over the same tensors, and the steps of the run that the baseline covers."""

    def __init__(self, baseline: Grid, run: Grid, loses_more: Bools | None = None) -> None:
        """
        Args:
            loses_more: if it is known.
        """
        #: layer, role
        self.tensors = baseline.tensors
        self._baseline = baseline
        # Of one metric at a time: they are large.
        self._values: dict[str, Floats] = {}
        self._medians: dict[str, Floats] = {}
        covered = min(baseline.steps, default=0), max(baseline.steps, default=-1)
        self._run = run.at(np.flatnonzero((run.steps >= covered[0]) & (run.steps <= covered[1])))
        #: int64 [S]
        self.steps = self._run.steps
        self._loses_more = loses_more

    def rows(self, some: Ints) -> Pair:
        """Some of its tensors, by their places."""
        mask = None if self._loses_more is None else self._loses_more[some]
        return Pair(self._baseline.rows(some), self._run.rows(some), mask)

    @property
    def loses_more(self) -> Bools:
        """[T, S]: whether more is lost than in the baseline, or that is not known; a gradient that vanishes behind the
        culprit loses less."""
        if self._loses_more is None:
            expected, found = self.of("mse")
            with np.errstate(divide="ignore", invalid="ignore"):
                more = np.log2(found) - np.log2(expected) > _MORE_LOST
            self._loses_more = more | np.isnan(found) | np.isnan(expected)
        return self._loses_more

    def of(self, metric: str) -> tuple[Floats, Floats]:
        """The median of the baseline at the run's steps, and the run's values; [T, S] each."""
        medians, steps, found = self.medians(metric), self._baseline.steps, self.of_run(metric)
        if np.array_equal(steps, self.steps) and not np.isnan(medians).any():
            return medians, found
        expected = np.full((len(medians), len(self.steps)), np.nan)
        for i, of_one in enumerate(medians):
            if (known := ~np.isnan(of_one)).any():
                expected[i] = np.interp(self.steps, steps[known], of_one[known])
        return expected, found

    def of_run(self, metric: str) -> Floats:
        """Values of the run, [T, S]."""
        return self._run.metric(metric)

    def of_baseline(self, metric: str) -> Floats:
        """Values of the baseline, at its own steps."""
        if metric not in self._values:
            self._values = {metric: self._baseline.metric(metric)}
        return self._values[metric]

    def medians(self, metric: str) -> Floats:
        """Running medians of the baseline, at its own steps."""
        if metric not in self._medians:
            self._medians = {metric: running_median(self.of_baseline(metric))}
        return self._medians[metric]

    def highest(self, evidence: Evidence) -> Floats:
        """[T, S]: the largest value of the baseline, scaled, at the samples around each of the run's steps.

        The baseline's first samples, whose scales are made up, count as the one behind them does.
        """
        values, steps = evidence.scaled(self.of_baseline(evidence.metric)), self._baseline.steps
        if not len(steps):
            return np.full((len(values), len(self.steps)), np.nan)
        values[:, :FIRST] = values[:, min(FIRST, len(steps) - 1)][:, None]
        around = np.pad(values, ((0, 0), (2, 1)), mode="edge")
        largest = reduce(np.fmax, [around[:, by : by + len(steps)] for by in range(4)])
        at: Floats = largest[:, np.clip(np.searchsorted(steps, self.steps), 0, len(steps) - 1)]
        return at

    @cached_property
    def sizes(self) -> Floats:
        """[T, S]: values of each tensor, an expert's differ from sample to sample; infinite where that is not known."""
        n = self._run.metric("n")
        with np.errstate(invalid="ignore"):
            return np.where(n > 0, n, np.inf)


def compute_limits(evidence: Evidence, pair: Pair) -> Floats:
    """[T, S]: the value beyond which a tensor is out; above it, or below it if a fall counts."""
    expected, _ = pair.of(evidence.metric)
    return evidence.unscaled(_usual(evidence, expected, pair) + least_rise_of(evidence, pair))


def compute_least_rise(evidence: Evidence, values: Floats, medians: Floats) -> Floats:
    """[T]: the least rise that counts: what counts however steady a baseline is, or more where it moves by more.

    Args:
        values: of the metric in the baseline, [T, S].
        medians: their running medians, [T, S].
    """
    usual = evidence.scaled(medians)
    moves = np.abs(evidence.scaled(values) - usual)
    spread = np.nan_to_num(1.4826 * lower_median(moves))  # a standard deviation
    farthest = np.nan_to_num(np.fmax.reduce(moves[:, FIRST:], axis=1, initial=0.0))
    counts = evidence.least_of(lower_median(usual)) if evidence.least_part else evidence.least
    least: Floats = np.fmax(counts, np.fmax(SPREADS * spread, farthest))
    return least


def least_of_values(evidence: Evidence, sizes: Floats) -> Floats:
    """As `sizes`: the least rise in percent at which enough values of a tensor are affected; sizes: how many it has."""
    least: Floats = 100 * evidence.least_values / sizes
    return least


def least_rise_of(evidence: Evidence, pair: Pair) -> Floats:
    """[T, S], or [T, 1] if all samples have the same: that counts."""
    least = compute_least_rise(evidence, pair.of_baseline(evidence.metric), pair.medians(evidence.metric))[:, None]
    return np.maximum(least, least_of_values(evidence, pair.sizes)) if evidence.least_values else least


def _usual(evidence: Evidence, expected: Floats, pair: Pair) -> Floats:
    """[T, S]: what the baseline does at these very steps is usual too, a transient that its median knows nothing of."""
    usual: Floats = np.fmax(evidence.scaled(expected), pair.highest(evidence))
    return usual


def measure_excess(evidence: Evidence, pair: Pair) -> tuple[Floats, Floats, Floats]:
    """[T, S] each: what the baseline has, what the run has, and how many times the least rise that counts that is above
    the band; -inf where it does not count."""
    expected, found = pair.of(evidence.metric)
    with np.errstate(invalid="ignore"):  # both may be infinite
        excess = evidence.scaled(found) - _usual(evidence, expected, pair)
    excess /= least_rise_of(evidence, pair)
    counts = ~np.isnan(excess) & (pair.loses_more | (not evidence.of_error) | (excess > evidence.anyway))
    return expected, found, np.where(counts, excess, -np.inf)


def _out(evidence: Evidence, pair: Pair) -> Iterator[Row]:
    """Rows of the tensors that are out by one metric."""
    places = _may_be_out(evidence, pair)
    if not len(places):
        return
    pair = pair.rows(places)
    expected, found, excess = measure_excess(evidence, pair)
    out = excess > 1
    needed = 1 if evidence.metric == "nonfinite" else IN_A_ROW
    for i in np.flatnonzero(out.any(axis=1)):
        start = _first_of_several(out[i], needed)
        if start is None and out.shape[1] >= IN_A_ROW:
            start = _transient(excess[i], evidence.transient)
        if start is not None:
            layer, role = pair.tensors.row(int(i))
            back = np.flatnonzero(~out[i, start:])
            samples = int(back[0]) if len(back) else out.shape[1] - start
            strength = float(np.median(excess[i, start : start + min(needed, samples)]))
            row = (layer, role, SHOWN_AS[role], evidence.metric, int(pair.steps[start]), samples, strength)
            yield (*row, float(found[i, start]), float(expected[i, start]))


def _may_be_out(evidence: Evidence, pair: Pair) -> Ints:
    """Places of the tensors that rise by enough, in any sample, above all that the baseline does around it.

    The others, most of them, cannot be out: what is usual is no less than that, and no less than `least` counts.
    """
    found = evidence.scaled(pair.of_run(evidence.metric))
    with np.errstate(invalid="ignore"):
        within = found - pair.highest(evidence) <= evidence.least
    rises = ~within & ~np.isnan(found)
    # Three samples in a row, or a transient behind the first ones: the first ones alone put no tensor out.
    behind = 0 if evidence.metric == "nonfinite" else FIRST
    return np.flatnonzero(rises[:, behind:].any(axis=1))


def _transient(excess: Floats, times: float) -> int | None:
    """The first sample that is far out, behind those whose scales are still made up."""
    far = excess > times
    far[:FIRST] = False
    return int(np.argmax(far)) if far.any() else None


def running_median(values: Floats) -> Floats:
    """[T, S] -> [T, S]: over `_HALF` samples on either side, windows as wide at either end as in the middle."""
    n = values.shape[1]
    width = min(n, 2 * _HALF + 1)
    if n == 0:
        return values
    rows = max(1, _AT_ONCE // n)
    medians = np.concatenate([_medians_of_windows(values[i : i + rows], width) for i in range(0, len(values), rows)])
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
