"""Compute the band of one tensor at each step for charts, with the same rules as `onset`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from ..runs.grid import Floats, Ints, MetricGrid
from .onset import (
    EVIDENCE,
    AlignedRunSamples,
    OnsetCriterion,
    compute_band_limits,
    compute_least_rise,
    drop_false_discoveries,
    find_unfiltered_onsets,
    measure_band_excess,
)


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
