"""How far FP8's grip on each tensor drifted from one run to another."""

from __future__ import annotations

import numpy as np
import polars as pl

from ...core.keys import SHOWN_AS
from ...errors import RecordError
from ..runs.grid import Floats, Grid, Paired, in_common, median
from ..runs.run import Run

#: percent; ratios of underflow and overflow below this are noise
_FLOOR_PCT = 0.01
#: share of the paired samples, from the end, that the ranking looks at
TAIL = 0.5
#: metrics of either run that stand beside the ranking
SHOWN = ("mse", "underflow_pct", "overflow_pct", "relative_error", "cosine", "amax", "scale_ratio_log2", "outlier_log2")


def drifts(baseline: Run, run: Run) -> pl.DataFrame:
    """How far each tensor drifted, over the later half of the samples of both runs that belong together.

    `drift_log2` takes the largest of three medians over those steps, each the log2 of a ratio run / baseline: of the
    underflow ratio, of the overflow ratio (both floored at 0.01%), and of the relative error. None of them depends on
    how large the tensor's values are. It is capped by the log2 of the MSE ratio: the MSE alone cannot rank tensors of
    different scale, but where it fell, as in a gradient that vanishes because another tensor broke the run, the drift
    is a consequence.

    Raises:
        RecordError: the runs have no tensor, or no step, in common.
    """
    pair = _Pair(*in_common(baseline.grid, run.grid))
    if not len(pair.steps):
        raise RecordError(_nothing_in_common(baseline, run))
    columns = _medians(pair) | _nonfinite_since(pair)
    drift = np.fmax(np.fmax(columns["underflow_log2"], columns["overflow_log2"]), columns["relative_error_log2"])
    rows = pair.tensors.with_columns(
        tensor=pl.col("role").replace_strict(SHOWN_AS),
        drift_log2=np.fmin(drift, columns["mse_log2"]),
        mse_ratio=2 ** columns["mse_log2"],
        **columns,
    )
    return (
        rows.filter(pair.sampled)
        .with_columns(pl.col(pl.Float64).fill_nan(None))
        .with_columns(pl.col("nonfinite_since", "nonfinite_order").cast(pl.Int64))
        .sort(
            pl.col("nonfinite_since"),
            pl.col("nonfinite_order"),
            -pl.col("drift_log2"),
            -pl.col("mse_log2"),
            nulls_last=True,
            maintain_order=True,
        )
        .select("layer", "tensor", "role", "drift_log2", pl.exclude("layer", "tensor", "role", "drift_log2", "mse_log2"))
    )


class _Pair:
    """Two runs over the same tensors, at the samples that belong together."""

    def __init__(self, baseline: Grid, run: Grid) -> None:
        self._grids = baseline, run
        #: layer, role
        self.tensors = baseline.tensors
        self.steps = Paired.of(baseline.steps, run.steps)
        tail = self.steps.last(TAIL)
        self._later = baseline.at(tail.baseline), run.at(tail.run)
        self._apart = ~(self._later[0].sampled & self._later[1].sampled)
        #: bool [T]: whether both runs sampled the tensor at one of them
        self.sampled = ~self._apart.all(axis=1)

    def of(self, metric: str) -> tuple[Floats, Floats]:
        """Of the baseline and of the run, over the later samples that have the tensor in both; [T, S] each."""
        baseline, run = (grid.of(metric) for grid in self._later)
        baseline[self._apart] = run[self._apart] = np.nan
        return baseline, run

    def at_all(self, metric: str) -> tuple[Floats, Floats]:
        """Of the baseline and of the run, at all samples that belong together; [T, P] each."""
        return self._grids[0].of(metric)[:, self.steps.baseline], self._grids[1].of(metric)[:, self.steps.run]

    def step(self, at: Floats) -> Floats:
        """The run's step of each of these places among the pairs."""
        result: Floats = self._grids[1].steps[self.steps.run][at.astype(np.int64)].astype(np.float64)
        return result


def _medians(pair: _Pair) -> dict[str, Floats]:
    """By name: `metric_baseline` and `metric_run` of those shown, and `metric_log2` of those that tell."""
    floors = {"underflow_pct": _FLOOR_PCT, "overflow_pct": _FLOOR_PCT, "relative_error": 0.0}
    ratios: dict[str, Floats] = {}
    shown: dict[str, Floats] = {}
    for metric in SHOWN:
        baseline, run = pair.of(metric)
        shown |= {f"{metric}_baseline": median(baseline), f"{metric}_run": median(run)}
        if metric in floors:
            ratios[f"{metric.removesuffix('_pct')}_log2"] = median(_ratio_log2(baseline, run, floors[metric]))
        elif metric == "mse":
            true = _ratio_log2(*pair.of("unscaled_mse"))  # whatever the loss scale of either
            either = _ratio_log2(baseline, run)
            ratios["mse_log2"] = median(np.where(np.isnan(true), either, true))
    return ratios | shown


def _ratio_log2(baseline: Floats, run: Floats, floor: float = 0.0) -> Floats:
    """A ratio with a zero is absent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2((run + floor) / (baseline + floor))
        result: Floats = np.where((baseline + floor > 0) & (run + floor > 0), ratio, np.nan)
    return result


def _nonfinite_since(pair: _Pair) -> dict[str, Floats]:
    """Since when a tensor of the run held NaN or infinity and the baseline's did not, and its place in the order of
    execution at that step."""
    baseline, run = pair.at_all("nonfinite")
    bad_only, order = (run > 0) & (baseline == 0), pair.at_all("nonfinite_order")[1]
    first, rows = bad_only.argmax(axis=1), np.arange(len(bad_only))
    ever = bad_only.any(axis=1)
    since = np.where(ever, pair.step(first), np.nan)
    return {"nonfinite_since": since, "nonfinite_order": np.where(ever, order[rows, first], np.nan)}


def _nothing_in_common(baseline: Run, run: Run) -> str:
    def described(run: Run) -> str:
        if run.metrics.is_empty():
            return f"{run.path} has no sampled step"
        steps, layers = run.metrics["step"], run.metrics["layer"]
        return f"{run.path} has {run.unit}s {steps[0]} to {steps[-1]} and layers such as {layers[0]!s}"

    return f"the runs have no sampled step and tensor in common: {described(baseline)}; {described(run)}"
