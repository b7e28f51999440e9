"""The band of one tensor step by step, and since when the tensor is out of it: what `onsets` goes by, to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from ..runs.grid import Floats, Grid, Ints
from .onset import EVIDENCE, Evidence, Pair, compute_limits, least_rise_of, list_onsets, measure_excess, select_discoveries


@dataclass(frozen=True)
class MetricBand:
    """The band of one metric at S samples of the run; NaN where the baseline has none."""

    #: [S]: a value below it is out; NaN if a fall does not count
    low: Floats
    #: [S]: the running median of the baseline
    expected: Floats
    #: [S]: a value above it is out
    high: Floats
    #: the least rise that counts, however steady the baseline: a difference, or how many times as much if `is_ratio`
    least: float
    is_ratio: bool
    #: samples that are out, and those of them that count: an error must lose more than the baseline does
    beyond: int
    counted: int


@dataclass(frozen=True)
class TensorBand:
    """The bands of a tensor's metrics, and what left them."""

    #: int64 [S]: samples of the run within the baseline's steps
    steps: Ints
    metrics: dict[str, MetricBand]
    #: as `onsets` has them, of this tensor: a row a metric that is out
    onsets: pl.DataFrame
    #: whether they are more than chance alone brings about among so many tensors
    is_sure: bool


def compute_tensor_band(baseline: Grid, run: Grid, tensors: int) -> TensorBand:
    """The bands of a tensor.

    Args:
        baseline: of one tensor, over all samples of its run.
        run: likewise, of the same tensor.
        tensors: that both runs have; of many a few are out by chance.

    Example:
        >>> from nemo_fp8_debug.analysis.runs.metrics import Metrics
        >>> rows = pl.DataFrame({"step": range(40), "layer": "fc1", "role": "input", "mse": 1e-3, "underflow_pct": 0.0})
        >>> risen = rows.with_columns((pl.col("underflow_pct", "mse") + pl.when(pl.col("step") < 20).then(0).otherwise(9.0)))
        >>> found = compute_tensor_band(Metrics.of(rows).grid, Metrics.of(risen).grid, tensors=1)
        >>> found.onsets["onset"].to_list(), float(found.metrics["underflow_pct"].high[0])
        ([20], 1.0)
    """
    pair, onsets = Pair(baseline, run), list_onsets(baseline, run)
    names = dict.fromkeys(evidence.metric for evidence in EVIDENCE)
    metrics = {name: _band([e for e in EVIDENCE if e.metric == name], pair) for name in names}
    return TensorBand(pair.steps, metrics, onsets, not select_discoveries(onsets, tensors).is_empty())


def _band(evidence: list[Evidence], pair: Pair) -> MetricBand:
    """Of a metric, whose rises count, and its falls if there is evidence of both."""
    expected, found = (values[0] for values in pair.of(evidence[0].metric))
    ends = {e.sign: compute_limits(e, pair)[0] for e in evidence}
    none = np.full_like(expected, np.nan)
    low, high = ends.get(-1, none), ends.get(1, none)
    with np.errstate(invalid="ignore"):
        beyond = (found > high) | (found < low)
    counts = np.any([measure_excess(e, pair)[2][0] > 1 for e in evidence], axis=0)
    least = float(np.min(least_rise_of(evidence[0], pair)[0], initial=np.inf))
    ratio = evidence[0].log2
    return MetricBand(low, expected, high, 2**least if ratio else least, ratio, int(beyond.sum()), int(counts.sum()))
