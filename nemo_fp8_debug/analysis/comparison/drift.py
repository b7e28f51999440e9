"""Measure how much the errors of each tensor differ between two runs (its drift)."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import numpy.typing as npt
import polars as pl

from ...core.keys import SHOWN_AS
from ...core.layer_names import find_expert_aggregate, is_expert_aggregate
from ...errors import RecordError
from ..runs.blocks import compute_by_tensor, map_tensor_chunks
from ..runs.grid import Floats, MetricGrid, SamplePairs, compute_last_axis_median
from ..runs.metrics import select_common_tensors
from ..runs.run import Run

#: a model with more layers than this is divided into thirds
_EACH = 8
# Numbers of 18 digits fit into the int64 column.
_NUMBER = re.compile(r"(?:^|\.)(\d{1,18})(?=\.|$)")


def parse_gemm_kind(layer: str) -> str:
    """Return a GEMM's kind: `decoder.layers.3.mlp.linear_fc2` -> `linear_fc2`. Experts get the prefix `experts.`."""
    last = next((part for part in reversed(layer.split(".")) if not part.isdigit() and part != "*"), layer)
    return f"experts.{last}" if is_expert_aggregate(layer) or find_expert_aggregate(layer) else last


def parse_layer_index(layer: str) -> int | None:
    """Return the index of the layer that contains a GEMM, or None for GEMMs outside of numbered layers, such as the output
    layer.
    """
    found = split_at_layer_index(layer)
    return found[1] if found else None


def split_at_layer_index(layer: str) -> tuple[str, int, str] | None:
    """Split a name at its layer index into prefix, index and suffix. Return None if the name has no index.

    Example:
        >>> split_at_layer_index("decoder.layers.3.mlp.linear_fc2")
        ('decoder.layers.', 3, '.mlp.linear_fc2')
    """
    found = _NUMBER.search(layer)
    return (layer[: found.start(1)], int(found[1]), layer[found.end(1) :]) if found else None


def add_kind_and_depth_columns(tensors: pl.DataFrame) -> pl.DataFrame:
    """Add columns kind, depth (null outside of numbered layers) and part (the part of the model, in words)."""
    names = tensors["layer"].unique()
    depths = [parse_layer_index(name) for name in names]
    places = pl.DataFrame(
        {"layer": names, "kind": [parse_gemm_kind(name) for name in names], "depth": pl.Series(depths, dtype=pl.Int64)},
    )
    n = max((d for d in depths if d is not None), default=-1) + 1
    parts = [_part(depth, n) for depth in depths]
    return tensors.join(places.with_columns(part=pl.Series(parts, dtype=pl.String)), on="layer", how="left")


def _part(depth: int | None, n: int) -> str:
    if depth is None:
        return "outside of layers"
    if n <= _EACH:
        return f"layer {depth}"
    third = ("first", "middle", "last")[depth * 3 // n]
    return f"{third} third"


def count_out_of_band_groups(tensors: pl.DataFrame) -> pl.DataFrame:
    """Count the tensors out of band by kind, depth and role.

    Args:
        tensors: layer, tensor, onset, drift_log2.

    Returns:
        One row for each group, with the columns `by` (kind, depth or role), group, tensors (number of tensors), out_of_band
        (number of tensors out of band), onset (the earliest) and drift_log2 (the median).
    """
    rows, tables = add_kind_and_depth_columns(tensors), []
    for by, column in (("kind", "kind"), ("depth", "part"), ("role", "tensor")):
        of_all = rows.group_by(column, maintain_order=True).agg(
            pl.len().cast(pl.Int64).alias("tensors"),
            pl.col("onset").is_not_null().sum().cast(pl.Int64).alias("out_of_band"),
            pl.col("onset").min(),
            pl.col("drift_log2").median(),
            pl.col("depth").min().alias("order"),
        )
        first = ["order"] if by == "depth" else ["onset"]
        ordered = of_all.sort(*first, column, nulls_last=True).drop("order").rename({column: "group"})
        tables.append(ordered.select(pl.lit(by).alias("by"), pl.all()))
    return pl.concat(tables)


def describe_common_property(tensors: pl.DataFrame) -> list[str]:
    """Describe in a sentence a property that only the tensors out of band have in common. Return no sentence if there is
    none.

    Args:
        tensors: as in `count_out_of_band_groups`.
    """
    rows = add_kind_and_depth_columns(tensors)
    out_of_band = rows.filter(pl.col("onset").is_not_null())
    if len(out_of_band) < 2:
        return []

    what = " of ".join(out_of_band[c][0] for c in ("tensor", "kind") if _shared(c, out_of_band, rows))
    where = _where(out_of_band, rows)
    common = " ".join(filter(None, (what, where)))
    return [f"All {len(out_of_band)} tensors out of band are {common}."] if common else []


def _where(out_of_band: pl.DataFrame, rows: pl.DataFrame) -> str:
    if _shared("depth", out_of_band, rows):
        depth = out_of_band["depth"][0]
        ends = {rows["depth"].min(): ", the first", rows["depth"].max(): ", the last"}
        return f"in layer {depth}{ends.get(depth, '')}"
    if _shared("part", out_of_band, rows) and "third" in out_of_band["part"][0]:
        return f"in the {out_of_band['part'][0]} of the layers"
    return ""


def _shared(column: str, out_of_band: pl.DataFrame, rows: pl.DataFrame) -> bool:
    """Return True if all tensors out of band have the same value, and some other tensors have a different value."""
    return out_of_band[column].n_unique() == 1 < rows[column].n_unique() and out_of_band[column].null_count() == 0


#: metrics that are compared as ratios, each with a noise level that is added to numerator and denominator
_FLOORS = {"underflow_pct": 0.01, "overflow_pct": 0.01, "relative_error": 0.0}
#: root mean square of a tensor's values, computed from its errors; null if it is zero or unknown
ROOT_MEAN_SQUARE = pl.when((pl.col("mse") > 0) & (pl.col("relative_error") > 0)).then(
    pl.col("mse").sqrt() / pl.col("relative_error")
)
#: the ranking uses the last samples of the runs: this share of the paired samples
TAIL = 0.5
#: metrics that the ranking shows for both runs
SHOWN = ("mse", "underflow_pct", "overflow_pct", "relative_error", "cosine", "amax", "scale_ratio_log2", "outlier_log2")
#: metrics that are read together
_TOGETHER = (("mse", "unscaled_mse"), SHOWN[1:3], SHOWN[3:5], SHOWN[5:7], SHOWN[7:])


def measure_drifts(baseline: Run, run: Run) -> pl.DataFrame:
    """Measure each tensor's drift over the later half of the paired samples of both runs.

    `drift_log2` is the largest of three medians of log2(run / baseline): for underflow, for overflow (0.01%
    is added to both runs' percentages), and for relative error. These metrics do not depend on the size of the values. The
    drift is at most the log2 ratio of the run's MSE to the baseline's. A metric that rises although the MSE does not is a
    consequence of another fault. For example, a gradient vanishes because another tensor broke the run.

    Raises:
        RecordError: the runs have no tensor or no step in common.
    """
    both = select_common_tensors(baseline.metrics, run.metrics)
    tail = SamplePairs.pair_nearest(*(each.steps for each in both)).select_last_part(TAIL)
    if not len(tail):
        raise RecordError(_nothing_in_common(baseline, run))
    later = both[0].select_samples(tail.baseline), both[1].select_samples(tail.run)
    found = pl.concat(map_tensor_chunks(_later, *later, together=_TOGETHER)).hstack(
        pl.concat(map_tensor_chunks(_lost, *both))
    )
    known = found.filter("sampled").drop("sampled").with_columns(pl.col(pl.Float64).fill_nan(None))
    rows = known.with_columns(pl.col("nonfinite_since", "nonfinite_order").cast(pl.Int64))
    return rows.sort(
        pl.col("nonfinite_since"),
        pl.col("nonfinite_order"),
        -pl.col("drift_log2"),
        -pl.col("mse_log2"),
        nulls_last=True,
        maintain_order=True,
    ).select("layer", "tensor", "role", "drift_log2", pl.exclude("layer", "tensor", "role", "drift_log2", "mse_log2"))


def _later(baseline: MetricGrid, run: MetricGrid) -> pl.DataFrame:
    """Compute the columns for the later samples, metric by metric, because only a few metrics of all tensors fit into
    memory.

    Args:
        baseline, run: grids of the paired samples, one sample of the run for each sample of the baseline.
    """
    columns = compute_by_tensor([_sampled, *(partial(_medians, metric) for metric in SHOWN)], baseline, run)
    drift = np.fmax(np.fmax(columns["underflow_log2"], columns["overflow_log2"]), columns["relative_error_log2"])
    return baseline.tensors.with_columns(
        tensor=pl.col("role").replace_strict(SHOWN_AS),
        drift_log2=np.fmin(drift, columns["mse_log2"]),
        mse_ratio=2 ** columns["mse_log2"],
        **columns,
    )


def _lost(baseline: MetricGrid, run: MetricGrid) -> pl.DataFrame:
    """Return the columns nonfinite_since and nonfinite_order; see `_nonfinite_since`."""
    return pl.DataFrame(compute_by_tensor([_nonfinite_since], baseline, run))


def _in_both(baseline: MetricGrid, run: MetricGrid) -> npt.NDArray[np.bool_]:
    """Return whether both runs sampled a tensor, [T, S]."""
    return baseline.sampled & run.sampled


def _sampled(baseline: MetricGrid, run: MetricGrid) -> dict[str, npt.NDArray[np.bool_]]:
    return {"sampled": _in_both(baseline, run).any(axis=1)}


def _medians(metric: str, baseline: MetricGrid, run: MetricGrid) -> dict[str, Floats]:
    """Return columns `metric_baseline` and `metric_run`, and `metric_log2` for metrics that the ranking uses."""
    apart = ~_in_both(baseline, run)
    is_any_apart = bool(apart.any())

    def of_both(name: str) -> tuple[Floats, Floats]:
        usual, found = baseline.read_metric(name), run.read_metric(name)
        if is_any_apart:
            usual[apart] = found[apart] = np.nan
        return usual, found

    both = of_both(metric)
    medians = {
        f"{metric}_{which}": compute_last_axis_median(values)
        for which, values in zip(("baseline", "run"), both, strict=True)
    }
    if metric in _FLOORS:
        medians[f"{metric.removesuffix('_pct')}_log2"] = compute_last_axis_median(_ratio_log2(*both, _FLOORS[metric]))
    elif metric == "mse":
        true = _ratio_log2(*of_both("unscaled_mse"))  # independent of the loss scales
        medians["mse_log2"] = compute_last_axis_median(np.where(np.isnan(true), _ratio_log2(*both), true))
    return medians


def _ratio_log2(baseline: Floats, run: Floats, floor: float = 0.0) -> Floats:
    """Return the log2 of the ratio, or NaN if numerator or denominator is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Floats = np.log2((run + floor) / (baseline + floor))
        ratio[~((baseline + floor > 0) & (run + floor > 0))] = np.nan
    return ratio


def _nonfinite_since(baseline: MetricGrid, run: MetricGrid) -> dict[str, Floats]:
    """Return for each tensor the first step at which only the run has NaN or infinity, and the tensor's place in execution
    order at this step.
    """
    pairs = SamplePairs.pair_nearest(baseline.steps, run.steps)
    usual, found = (grid.read_metric("nonfinite")[:, at] for grid, at in ((baseline, pairs.baseline), (run, pairs.run)))
    bad_only = (found > 0) & (usual == 0)
    first, rows = bad_only.argmax(axis=1), np.arange(len(bad_only))
    ever = bad_only.any(axis=1)
    if not ever.any():
        return {name: np.full(len(ever), np.nan) for name in ("nonfinite_since", "nonfinite_order")}
    since = np.where(ever, run.steps[pairs.run][first], np.nan)
    order = run.read_metric("nonfinite_order")[:, pairs.run]
    return {"nonfinite_since": since, "nonfinite_order": np.where(ever, order[rows, first], np.nan)}


def _nothing_in_common(baseline: Run, run: Run) -> str:
    def described(run: Run) -> str:
        if run.metrics.is_empty():
            return f"{run.path} has no sampled step"
        steps, layers = run.metrics.steps, run.metrics.tensors["layer"]
        return f"{run.path} has {run.unit}s {steps[0]} to {steps[-1]} and layers such as {layers[0]!r}"

    return f"the runs have no sampled step and tensor in common: {described(baseline)}; {described(run)}"
