"""Rank the tensors of a run, in one order for all views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from ...core.keys import Key
from ..comparison.compare import Comparison, split_off_single_experts
from ..comparison.drift import SHOWN, TAIL
from ..runs.blocks import compute_by_tensor, map_tensor_chunks
from ..runs.grid import Floats, MetricGrid, compute_last_axis_median
from ..runs.run import Run
from .answer import DiagnosisResult
from .finding import Finding

KEY = ["layer", "role"]
#: groups of the ranking: blamed, also wrong, out of band for another reason, and the rest
BLAMED, ALSO_WRONG, OUT, REST = range(4)
#: metrics of precision loss, with the value that means a complete loss
_SHARES = {"relative_error": 1.0, "underflow_pct": 100.0, "overflow_pct": 100.0}
_OUT_OF_BAND: dict[str, type[pl.DataType]] = {
    **{"layer": pl.String, "role": pl.String, "onset": pl.Int64, "metric": pl.String},
    **{"value": pl.Float64, "expected": pl.Float64, "excess": pl.Float64},
}
_SCHEMA = {"layer": pl.String, "role": pl.String, "group": pl.Int64, "told": pl.Int64, "found_since": pl.Int64}


def make_tensor_ranking_table(found: DiagnosisResult) -> pl.DataFrame:
    """Rank the tensors of a run. The tensors that the verdict is based on come first.

    Returns:
        One row for each tensor. The experts of a layer count as one tensor. The columns are layer, role, group (BLAMED,
        ALSO_WRONG, OUT or REST), onset (first step out of band, or null), metric, value and expected (at the onset), excess
        (multiple of the threshold), drift_log2 and mse_ratio (null without a baseline), has_baseline (whether the baseline
        has the tensor), `{metric}_run` and `{metric}_baseline` (medians over the later half of the samples), lost and
        lost_baseline (the largest of relative error, underflow and overflow, each as a share), harm_rank and error_rank
        (from 1). The order of the harm rank is: blamed tensors, tensors that are also wrong, tensors out of band by onset,
        and the rest by drift. The error rank sorts by `lost`, and NaN and infinity come first.

    Example:
        >>> from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
        >>> ranking = make_tensor_ranking_table(diagnose("runs/bad", "runs/baseline"))
        >>> ranking.select("layer", "role", "harm_rank", "error_rank").columns
        ['layer', 'role', 'harm_rank', 'error_rank']
    """
    named = _named(found)
    rows = _tensors(found, named)
    rows = rows.join(_first_out(found), on=KEY, how="left", maintain_order="left")
    rows = rows.join(named, on=KEY, how="left", maintain_order="left")
    rows = rows.with_columns(pl.col("group").fill_null(REST), onset=pl.coalesce("found_since", "onset"))
    is_out = (pl.col("group") == REST) & pl.col("onset").is_not_null()
    rows = rows.with_columns(group=pl.when(is_out).then(OUT).otherwise("group"))
    told = pl.when(pl.col("group") < OUT).then("told")
    order = ("group", told, "onset", -pl.col("excess"), -pl.col("drift_log2"), -pl.col("lost"))
    rows = rows.sort(*order, nulls_last=True, maintain_order=True).with_row_index("harm_rank", offset=1)
    worst = pl.struct(pl.col("nonfinite").fill_null(0.0) > 0, pl.col("lost").fill_null(-1.0))
    ranks = worst.rank("ordinal", descending=True).alias("error_rank")
    return rows.with_columns(ranks).drop("told", "found_since", "nonfinite")


def rank_tensors_by_harm(found: DiagnosisResult) -> dict[Key, int]:
    """Return the harm rank of each tensor, from 1."""
    return {
        (layer, role): rank for layer, role, rank in make_tensor_ranking_table(found).select(*KEY, "harm_rank").iter_rows()
    }


def sort_rows_by_harm(rows: Sequence[Mapping[str, Any]], found: DiagnosisResult) -> list[dict[str, Any]]:
    """Return rows of tensors (with layer and role) in order of harm, with the column harm_rank."""
    ranks = rank_tensors_by_harm(found)
    with_ranks = [{**row, "harm_rank": ranks[row["layer"], row["role"]]} for row in rows]
    return sorted(with_ranks, key=lambda row: row["harm_rank"])


def _named(found: DiagnosisResult) -> pl.DataFrame:
    """Return layer, role, group, told (index among the findings) and found_since of the tensors that findings name."""
    groups: dict[Key, tuple[int, int, int | None]] = {}

    def add(findings: Sequence[Finding | None], group: int) -> None:
        for finding in findings:
            if finding is not None and finding.layer and finding.role:
                groups.setdefault((finding.layer, finding.role), (group, len(groups), finding.since))

    add([found.culprit], BLAMED)
    add(found.decision.also, ALSO_WRONG)
    add([f for f in found.findings if f.is_out_of_band], OUT)
    return pl.DataFrame([(*key, *about) for key, about in groups.items()], _SCHEMA, orient="row")


def _tensors(found: DiagnosisResult, named: pl.DataFrame) -> pl.DataFrame:
    """Return layer, role, drift_log2 and medians of all tensors, and of single experts that findings name."""
    run = _medians(found.run, "run", found.comparison)
    run = run.join(
        compute_tensor_medians(found.run, ["nonfinite"], most=["nonfinite"]), on=KEY, how="left", maintain_order="left"
    )
    apart = split_off_single_experts(run)[0]
    rows = pl.concat([apart, run.join(apart, on=KEY, how="anti").join(named, on=KEY, how="semi")])
    missing = named.select(KEY).join(rows, on=KEY, how="anti", maintain_order="left")
    rows = pl.concat([rows, missing], how="diagonal")
    if found.comparison is None:
        names = ("drift_log2", "mse_ratio", "lost_baseline", *(f"{name}_baseline" for name in SHOWN))
        return rows.with_columns(has_baseline=False, **{name: pl.lit(None, pl.Float64) for name in names})
    compared = pl.concat([found.comparison.tensors, found.comparison.experts])
    baseline = _medians(found.comparison.baseline, "baseline", found.comparison).rename({"lost": "lost_baseline"})
    rows = rows.join(baseline.with_columns(has_baseline=True), on=KEY, how="left", maintain_order="left")
    rows = rows.join(compared.select(*KEY, "drift_log2", "mse_ratio"), on=KEY, how="left", maintain_order="left")
    return rows.with_columns(pl.col("has_baseline").fill_null(False))


def _medians(run: Run, suffix: str, comparison: Comparison | None) -> pl.DataFrame:
    """Return layer, role, `{metric}_{suffix}` and lost over the later half of the samples."""
    if comparison is not None and comparison.has_equal_sampling:
        known = pl.concat([comparison.tensors, comparison.experts]).select(*KEY, *(f"{name}_{suffix}" for name in SHOWN))
        rows = run.metrics.tensors.join(known, on=KEY, how="left", maintain_order="left")
    else:
        rows = compute_tensor_medians(run, SHOWN).rename({name: f"{name}_{suffix}" for name in SHOWN})
    shares = [pl.col(f"{name}_{suffix}") / of for name, of in _SHARES.items()]
    return rows.with_columns(lost=pl.max_horizontal(shares))


def compute_tensor_medians(run: Run, metrics: Sequence[str], most: Sequence[str] = ()) -> pl.DataFrame:
    """Return layer, role and each metric's median over the later half of the samples. For metrics in `most`, return the
    maximum.
    """
    steps = run.metrics.steps
    later = run.metrics.select_steps(steps[-max(1, round(len(steps) * TAIL)) :])
    if later.is_empty():
        return later.tensors.with_columns(pl.lit(None, pl.Float64).alias(name) for name in metrics)
    functions = [partial(_of_later, name, name in most) for name in metrics]
    rows = map_tensor_chunks(partial(_columns, functions), later)
    return pl.concat(rows).with_columns(pl.col(metrics).fill_nan(None))


def _columns(functions: Sequence[Callable[..., dict[str, Floats]]], grid: MetricGrid) -> pl.DataFrame:
    return grid.tensors.with_columns(**compute_by_tensor(functions, grid))


def _of_later(metric: str, most: bool, grid: MetricGrid) -> dict[str, Floats]:
    values = grid.read_metric(metric)
    return {metric: np.fmax.reduce(values, axis=1) if most else compute_last_axis_median(values)}


def _first_out(found: DiagnosisResult) -> pl.DataFrame:
    """Return the first onset of each tensor out of the baseline's band, with metric, value, expected and excess."""
    if found.comparison is None:
        return pl.DataFrame(schema=_OUT_OF_BAND)
    both = [found.comparison.out_of_band, found.comparison.experts_out_of_band]
    return pl.concat(both).group_by(KEY, maintain_order=True).first().select(*_OUT_OF_BAND)
