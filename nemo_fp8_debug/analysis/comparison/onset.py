"""Find the step at which a tensor of a run left the band of a baseline, and the metric by which it left.

The band of a metric is its running median in the baseline, plus or minus its usual changes from sample to sample. A tensor
is out of band from the first of several consecutive samples beyond the band. The metrics do not depend on the size of the
values, and are scaled so that equal differences are equally serious.
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
from ...core.threads import map_in_threads
from ...numerics.limits import LEAST_VALUES
from ..runs.blocks import map_tensor_chunks
from ..runs.grid import Floats, Ints, MetricGrid, compute_last_axis_lower_median
from ..runs.metrics import MetricsTable, select_common_tensors
from ..runs.source import Bools


@dataclass(frozen=True)
class OnsetCriterion:
    """A metric by which a tensor can be out of band."""

    metric: str
    #: the least rise that counts, even if the baseline varies by less; in log2 units if `log2`
    least: float
    #: whether the metric measures precision loss. If so, a rise counts only if the MSE also rises, or if the rise exceeds
    #: `anyway`
    of_error: bool = False
    #: multiple of the least rise from which a rise counts even if the MSE does not rise
    anyway: float = np.inf
    #: whether the scale is logarithmic, so that equal ratios are equally serious
    log2: bool = False
    #: for a log2 scale: values below this value result from rounding and count as this value
    floor: float = 0.01
    #: scaled values below this value count as this value, because they are equally good
    good: float = -np.inf
    #: 1 if a rise counts, -1 if a fall counts
    sign: int = 1
    #: multiple of the least rise above which even one sample counts, as a transient
    transient: float = 6.0
    #: least number of values that a rise must affect, if `least` is a percentage of a tensor's values
    least_values: int = 0
    #: least rise as a fraction of the usual value, because the large losses of FP4 vary by percentage points
    least_part: float = 0.0

    def compute_least_rise_above(self, usual: Floats) -> Floats:
        """Return the least rise above the (scaled) usual value that counts."""
        least: Floats = np.fmax(self.least, self.least_part * usual)
        return least

    def convert_to_severity_scale(self, x: Floats) -> Floats:
        """Convert values to the scale on which equal differences are equally serious."""
        return np.maximum(self.sign * (np.log2(np.maximum(x, self.floor)) if self.log2 else x), self.good)

    def unscaled(self, x: Floats) -> Floats:
        """Convert scaled values back."""
        return np.exp2(self.sign * x) if self.log2 else self.sign * x


#: if the baseline is another model, only rises by at least this multiple of the least rise count; the second multiple is for
#: gradients, which also differ between tasks
OF_OTHER_MODELS, OF_GRADIENTS = 2.0, 4.0
#: ordered so that each entry may cause the next: a stale scale clips values, and clipping causes errors
EVIDENCE = (
    OnsetCriterion("nonfinite", 0.5),
    OnsetCriterion("scale_ratio_log2", 1.0, good=0.0),  # at values below 0, nothing is clipped
    OnsetCriterion("scale_ratio_log2", 6.0, sign=-1, transient=2.0),
    OnsetCriterion("overflow_pct", 0.05, of_error=True, least_values=LEAST_VALUES, least_part=0.5),
    OnsetCriterion("underflow_pct", 1.0, of_error=True, least_part=0.5),
    OnsetCriterion("relative_error", 0.585, of_error=True, log2=True),  # 0.585 bits are a rise by half
    OnsetCriterion("outlier_log2", 3.0, of_error=True, transient=3.0, anyway=2.5),
)


#: largest expected share of false discoveries in the tensors that are reported as out of band
RATE = 0.01
#: probability that a tensor of a healthy run is out of band, and the decrease of its logarithm per unit of excess. Both are
#: upper bounds over pairs of clean runs in the benchmark (`scripts/validation/fault_injection/false_discoveries.py`)
CHANCE, FALLS = 4e-4, 6.0


def drop_false_discoveries(rows: pl.DataFrame, tensors: int) -> pl.DataFrame:
    """Keep the rows of tensors that are out of band by more than chance explains (Benjamini and Hochberg, JRSS B 57, 1995).

    NaN and infinity always count.

    Args:
        rows: layer, role, metric and excess of the tensors that are out of band.
        tensors: number of all tensors that were tested.

    Example:
        >>> rows = pl.DataFrame({"layer": ["fc1"], "role": ["input"], "metric": ["underflow_pct"], "excess": [1.6]})
        >>> len(drop_false_discoveries(rows, 60)), len(drop_false_discoveries(rows, 6000))
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
    """Return the largest probability that still counts as a discovery, or -1 if there is no discovery.

    We do not use `scipy.stats.false_discovery_control`, because importing `scipy.stats` takes half a second.

    Args:
        chances: the probabilities of all tests whose probability is below 1.
        of: number of all tests, including tests with probability 1.
    """
    ascending = np.sort(chances)
    found = np.flatnonzero(ascending <= RATE * np.arange(1, len(ascending) + 1) / of)
    return float(ascending[found[-1]]) if len(found) else -1.0


#: row of one tensor that is out of band, with columns as in `_SCHEMA`
Row = tuple[str | int | float, ...]
#: a rise of this many standard deviations of the baseline counts
SPREADS = 6.0
#: number of first samples, in which scales may still be initial values
FIRST = 2
#: number of consecutive samples beyond the band after which a tensor is out of band
IN_A_ROW = 3
#: log2 of the least rise of the MSE, which is a rise by half
_MORE_LOST = 0.585
#: groups of metrics that are read together, in the order in which they are evaluated. An overflow percentage also needs the
#: number of values
_TOGETHER = (("mse", "nonfinite"), ("overflow_pct", "n"), ("scale_ratio_log2",), ("underflow_pct", "relative_error"))
#: number of samples on either side of the window of a running median
_HALF = 4
#: number of values in one batch of medians, small enough to fit into the cache
_AT_ONCE = 1 << 14
_EXCHANGES = (
    *((1, 2), (4, 5), (7, 8), (0, 1), (3, 4), (6, 7), (1, 2), (4, 5), (7, 8), (0, 3)),
    *((5, 8), (4, 7), (3, 6), (1, 4), (2, 5), (4, 7), (4, 2), (6, 4), (4, 2)),
)


def find_onsets(baseline: MetricsTable, run: MetricsTable) -> pl.DataFrame:
    """For each tensor in both runs, find the step at which it left the baseline's band.

    The runs may have sampled different steps. Only the range of steps that both runs cover is compared.

    Returns:
        One row for each metric by which a tensor is out of band, earliest first, then strongest. The columns are layer,
        role, tensor (the role's usual name), metric, onset (step), samples (number of consecutive samples out of band; a
        transient has fewer than 3), excess (the rise in units of the least rise that counts, median over the first
        of these samples), value and expected (the run's value and the baseline's running median at the onset). At most 1% of
        the tensors are false discoveries (see `drop_false_discoveries`).
    """
    both = select_common_tensors(baseline, run)
    found = map_tensor_chunks(_rows, *both, together=_TOGETHER)
    return drop_false_discoveries(_in_order(found), len(both[0].tensors))


def find_unfiltered_onsets(baseline: MetricGrid, run: MetricGrid) -> pl.DataFrame:
    """Return the rows of `find_onsets` for two grids of the same tensors, without removing false discoveries."""
    return _in_order([_rows(baseline, run)])


def _rows(baseline: MetricGrid, run: MetricGrid) -> list[list[Row]]:
    """Return the rows of the tensors that are out of band, for each metric.

    Only one or two metrics of all tensors fit into memory, so evaluate one metric after another, for some tensors at a time.
    """

    def pair(some: slice, loses_more: Bools | None = None) -> AlignedRunSamples:
        return AlignedRunSamples(baseline.select_tensors_by_index(some), run.select_tensors_by_index(some), loses_more)

    parts = baseline.slice_tensors()
    masks = list(map_in_threads(lambda some: pair(some).loses_more, parts))
    found: list[list[Row]] = []
    for _, of_metric in itertools.groupby(EVIDENCE, lambda evidence: evidence.metric):
        alike = list(of_metric)

        def out(of_part: tuple[slice, Bools], alike: list[OnsetCriterion] = alike) -> list[list[Row]]:
            here = pair(*of_part)
            return [list(_out(evidence, here)) for evidence in alike]

        of_parts = list(map_in_threads(out, list(zip(parts, masks, strict=True))))
        found += [[row for rows in of_parts for row in rows[i]] for i in range(len(alike))]
    return found


def _in_order(found: Sequence[Sequence[Sequence[Row]]]) -> pl.DataFrame:
    """Merge the rows of all blocks in order of onset and excess.

    Args:
        found: rows for each block of tensors and each evidence.
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


class AlignedRunSamples:
    """The samples of two runs for the same tensors, limited to the steps of the run that the baseline covers."""

    def __init__(self, baseline: MetricGrid, run: MetricGrid, loses_more: Bools | None = None) -> None:
        """
        Args:
            loses_more: value of the property with this name, if already known.
        """
        #: layer and role of T tensors
        self.tensors = baseline.tensors
        self._baseline = baseline
        # These caches contain large arrays; `_values` contains one metric at a time.
        self._values: dict[str, Floats] = {}
        self._medians: dict[str, Floats] = {}
        covered = min(baseline.steps, default=0), max(baseline.steps, default=-1)
        self._run = run.select_samples(np.flatnonzero((run.steps >= covered[0]) & (run.steps <= covered[1])))
        #: int64 [S]
        self.steps = self._run.steps
        self._loses_more = loses_more

    def select_tensors_by_index(self, some: Ints) -> AlignedRunSamples:
        """Return the pair for some of the tensors, by index."""
        mask = None if self._loses_more is None else self._loses_more[some]
        return AlignedRunSamples(self._baseline.select_tensors_by_index(some), self._run.select_tensors_by_index(some), mask)

    @property
    def loses_more(self) -> Bools:
        """Return whether the MSE is higher than in the baseline, or unknown, [T, S].

        For example, a gradient that vanishes because another tensor is faulty has a lower MSE.
        """
        if self._loses_more is None:
            expected, found = self.compute_medians_and_values("mse")
            with np.errstate(divide="ignore", invalid="ignore"):
                more = np.log2(found) - np.log2(expected) > _MORE_LOST
            self._loses_more = more | np.isnan(found) | np.isnan(expected)
        return self._loses_more

    def compute_medians_and_values(self, metric: str) -> tuple[Floats, Floats]:
        """Return the baseline's running median at the run's steps, and the run's values, [T, S] each."""
        medians, steps, found = self.medians(metric), self._baseline.steps, self.read_run_values(metric)
        if np.array_equal(steps, self.steps) and not np.isnan(medians).any():
            return medians, found
        expected = np.full((len(medians), len(self.steps)), np.nan)
        for i, of_one in enumerate(medians):
            if (known := ~np.isnan(of_one)).any():
                expected[i] = np.interp(self.steps, steps[known], of_one[known])
        return expected, found

    def read_run_values(self, metric: str) -> Floats:
        """Return the values of the run, [T, S]."""
        return self._run.read_metric(metric)

    def of_baseline(self, metric: str) -> Floats:
        """Return the values of the baseline at the baseline's steps."""
        if metric not in self._values:
            self._values = {metric: self._baseline.read_metric(metric)}
        return self._values[metric]

    def medians(self, metric: str) -> Floats:
        """Return the running medians of the baseline at the baseline's steps."""
        if metric not in self._medians:
            self._medians = {metric: compute_running_median(self.of_baseline(metric))}
        return self._medians[metric]

    def highest(self, evidence: OnsetCriterion) -> Floats:
        """Return the largest scaled value of the baseline in the samples around each of the run's steps, [T, S].

        In the baseline's first samples, scales have initial values, so use the first sample after them instead.
        """
        values, steps = evidence.convert_to_severity_scale(self.of_baseline(evidence.metric)), self._baseline.steps
        if not len(steps):
            return np.full((len(values), len(self.steps)), np.nan)
        values[:, :FIRST] = values[:, min(FIRST, len(steps) - 1)][:, None]
        around = np.pad(values, ((0, 0), (2, 1)), mode="edge")
        largest = reduce(np.fmax, [around[:, by : by + len(steps)] for by in range(4)])
        at: Floats = largest[:, np.clip(np.searchsorted(steps, self.steps), 0, len(steps) - 1)]
        return at

    @cached_property
    def tensor_sizes(self) -> Floats:
        """Return the number of values of each tensor, [T, S], infinite if unknown. For experts, it varies between
        samples.
        """
        n = self._run.read_metric("n")
        with np.errstate(invalid="ignore"):
            return np.where(n > 0, n, np.inf)


def compute_band_limits(evidence: OnsetCriterion, pair: AlignedRunSamples) -> Floats:
    """Return the limit of the band, [T, S]. A tensor is out of band above the limit, or below the limit if a fall counts."""
    expected, _ = pair.compute_medians_and_values(evidence.metric)
    return evidence.unscaled(_usual(evidence, expected, pair) + compute_least_rise(evidence, pair))


def compute_least_rise_from_baseline(evidence: OnsetCriterion, values: Floats, medians: Floats) -> Floats:
    """Return the least rise that counts, [T]: a fixed minimum, or more if the baseline itself varies by more.

    Args:
        values: values of the metric in the baseline, [T, S].
        medians: running medians of `values`, [T, S].
    """
    usual = evidence.convert_to_severity_scale(medians)
    moves = np.abs(evidence.convert_to_severity_scale(values) - usual)
    spread = np.nan_to_num(1.4826 * compute_last_axis_lower_median(moves))  # an estimate of the standard deviation
    farthest = np.nan_to_num(np.fmax.reduce(moves[:, FIRST:], axis=1, initial=0.0))
    counts = (
        evidence.compute_least_rise_above(compute_last_axis_lower_median(usual)) if evidence.least_part else evidence.least
    )
    least: Floats = np.fmax(counts, np.fmax(SPREADS * spread, farthest))
    return least


def compute_least_rise_for_size(evidence: OnsetCriterion, sizes: Floats) -> Floats:
    """Return the least rise in percent that affects enough values, for tensors of these sizes."""
    least: Floats = 100 * evidence.least_values / sizes
    return least


def compute_least_rise(evidence: OnsetCriterion, pair: AlignedRunSamples) -> Floats:
    """Return the least rise that counts, [T, S], or [T, 1] if it is equal for all samples."""
    least = compute_least_rise_from_baseline(evidence, pair.of_baseline(evidence.metric), pair.medians(evidence.metric))[
        :, None
    ]
    return np.maximum(least, compute_least_rise_for_size(evidence, pair.tensor_sizes)) if evidence.least_values else least


def _usual(evidence: OnsetCriterion, expected: Floats, pair: AlignedRunSamples) -> Floats:
    """Return the usual values, [T, S]. They include the baseline's transients around each step, which medians ignore."""
    usual: Floats = np.fmax(evidence.convert_to_severity_scale(expected), pair.highest(evidence))
    return usual


def measure_band_excess(evidence: OnsetCriterion, pair: AlignedRunSamples) -> tuple[Floats, Floats, Floats]:
    """Return the baseline's median, the run's values, and the excess in units of the least rise, [T, S] each.

    The excess is -inf in samples that do not count.
    """
    expected, found = pair.compute_medians_and_values(evidence.metric)
    with np.errstate(invalid="ignore"):  # both may be infinite
        excess = evidence.convert_to_severity_scale(found) - _usual(evidence, expected, pair)
    excess /= compute_least_rise(evidence, pair)
    counts = ~np.isnan(excess) & (pair.loses_more | (not evidence.of_error) | (excess > evidence.anyway))
    return expected, found, np.where(counts, excess, -np.inf)


def _out(evidence: OnsetCriterion, pair: AlignedRunSamples) -> Iterator[Row]:
    """Yield the rows of the tensors that are out of band by one metric."""
    places = _may_be_out(evidence, pair)
    if not len(places):
        return
    pair = pair.select_tensors_by_index(places)
    expected, found, excess = measure_band_excess(evidence, pair)
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


def _may_be_out(evidence: OnsetCriterion, pair: AlignedRunSamples) -> Ints:
    """Return the indices of the tensors that may be out of band, to skip the others.

    In some sample, the value of such a tensor is at least `least` above the baseline's largest value around this step.
    """
    found = evidence.convert_to_severity_scale(pair.read_run_values(evidence.metric))
    with np.errstate(invalid="ignore"):
        within = found - pair.highest(evidence) <= evidence.least
    rises = ~within & ~np.isnan(found)
    # An onset needs three consecutive samples, or a transient after the first two samples. So the first two alone never
    # count.
    behind = 0 if evidence.metric == "nonfinite" else FIRST
    return np.flatnonzero(rises[:, behind:].any(axis=1))


def _transient(excess: Floats, times: float) -> int | None:
    """Return the first sample that is far out of band. Ignore the first two samples, in which scales have initial values."""
    far = excess > times
    far[:FIRST] = False
    return int(np.argmax(far)) if far.any() else None


def compute_running_median(values: Floats) -> Floats:
    """Return the running median over `_HALF` samples on either side, [T, S]. The window keeps its width at both ends."""
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
        return compute_last_axis_lower_median(windows)
    medians = _median_of_9([windows[..., i] for i in range(width)])
    holes = np.isnan(medians)  # the exchanges spread a NaN in a window to the result
    if holes.any():
        medians[holes] = compute_last_axis_lower_median(windows[holes])
    return medians


def _median_of_9(values: list[Floats]) -> Floats:
    """Return the medians of all windows at once, by exchanging elements until the median is in the middle.

    See Paeth, Median Finding on a 3x3 Grid, in Graphics Gems, 1990.
    """
    v = list(values)
    for a, b in _EXCHANGES:
        v[a], v[b] = np.minimum(v[a], v[b]), np.maximum(v[a], v[b])
    return v[4]


def _first_of_several(out: npt.NDArray[np.bool_], needed: int) -> int | None:
    """Return the first index at which `needed` consecutive samples begin, or None."""
    if len(out) < needed:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(out, needed).all(-1)
    return int(np.argmax(runs)) if runs.any() else None


# Bands of one tensor, for charts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricBand:
    """The band of one metric at S samples of the run; NaN if the baseline has no value."""

    #: lower limit: values below are out of band, [S]; NaN if a fall does not count
    low: Floats
    #: running median of the baseline, [S]
    expected: Floats
    #: upper limit: values above are out of band, [S]
    high: Floats
    #: least rise that counts: a difference, or a factor if `is_ratio`
    least: float
    is_ratio: bool
    #: number of samples outside the band, and number of these samples that count (errors count only if the MSE also rises)
    beyond: int
    counted: int


@dataclass(frozen=True)
class TensorBand:
    """The bands of a tensor's metrics, and the metrics that left their band."""

    #: sampled steps of the run that the baseline covers, int64 [S]
    steps: Ints
    metrics: dict[str, MetricBand]
    #: rows of `find_unfiltered_onsets` for this tensor, one for each metric that is out of band
    onsets: pl.DataFrame
    #: whether the onsets are unlikely to be by chance, given the number of tensors that were tested
    is_sure: bool


def compute_tensor_band(baseline: MetricGrid, run: MetricGrid, tensors: int) -> TensorBand:
    """Compute the bands of a tensor.

    Args:
        baseline: grid of one tensor over all samples of the baseline.
        run: grid of the same tensor in the run.
        tensors: number of tensors in both runs. It matters because with many tensors, a few are out of band by chance.

    Example:
        >>> from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
        >>> rows = pl.DataFrame({"step": range(40), "layer": "fc1", "role": "input", "mse": 1e-3, "underflow_pct": 0.0})
        >>> risen = rows.with_columns((pl.col("underflow_pct", "mse") + pl.when(pl.col("step") < 20).then(0).otherwise(9.0)))
        >>> grids = [MetricsTable.from_rows(each).grid for each in (rows, risen)]
        >>> found = compute_tensor_band(*grids, tensors=1)
        >>> found.onsets["onset"].to_list(), float(found.metrics["underflow_pct"].high[0])
        ([20], 1.0)
    """
    pair, onsets = AlignedRunSamples(baseline, run), find_unfiltered_onsets(baseline, run)
    names = dict.fromkeys(evidence.metric for evidence in EVIDENCE)
    metrics = {name: _band([e for e in EVIDENCE if e.metric == name], pair) for name in names}
    return TensorBand(pair.steps, metrics, onsets, not drop_false_discoveries(onsets, tensors).is_empty())


def _band(evidence: list[OnsetCriterion], pair: AlignedRunSamples) -> MetricBand:
    """Return the band of a metric, with an upper limit, and with a lower limit if falls count too."""
    expected, found = (values[0] for values in pair.compute_medians_and_values(evidence[0].metric))
    ends = {e.sign: compute_band_limits(e, pair)[0] for e in evidence}
    none = np.full_like(expected, np.nan)
    low, high = ends.get(-1, none), ends.get(1, none)
    with np.errstate(invalid="ignore"):
        beyond = (found > high) | (found < low)
    counts = np.any([measure_band_excess(e, pair)[2][0] > 1 for e in evidence], axis=0)
    least = float(np.min(compute_least_rise(evidence[0], pair)[0], initial=np.inf))
    ratio = evidence[0].log2
    return MetricBand(low, expected, high, 2**least if ratio else least, ratio, int(beyond.sum()), int(counts.sum()))
