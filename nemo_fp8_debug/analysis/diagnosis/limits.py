"""Limits that no healthy operand exceeds. Without a baseline, they are the only evidence against an operand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import polars as pl

from ...numerics.limits import FAR, FORMATS, LEAST_VALUES, LIMITS, MADE_UP
from ..comparison.compare import select_quantized_operands, split_off_single_experts
from ..runs.blocks import map_grid_slices, map_tensor_chunks
from ..runs.grid import Floats, MetricGrid
from ..runs.metrics import MetricsTable
from ..runs.run import Run

#: metrics that have limits, and the metric with the number of values
COLUMNS = ("n", *LIMITS["input"])


def find_operands_over_limit(metrics: MetricsTable, least: float = 1.0) -> pl.DataFrame:
    """Find operands beyond a limit in two consecutive samples, or far beyond a limit in one sample.

    Args:
        metrics: metrics of the operands.
        least: least multiple of a limit that counts.

    Returns:
        A table with layer, role, onset (step) and excess (multiple of a limit), earliest onset first. In the first samples,
        scales have initial values, so these samples count only if later samples are also beyond the limit.

    Example:
        >>> nothing = {"layer": ["fc1"] * 5, "role": ["weight"] * 5, "underflow_pct": [0.0] * 5, "overflow_pct": [0.0] * 5}
        >>> off = pl.DataFrame(nothing | {"step": [0, 5, 10, 15, 20], "scale_ratio_log2": [9.0, 0, 0, 7, 7]})
        >>> find_operands_over_limit(MetricsTable.from_rows(off)).row(0)
        ('fc1', 'weight', 15, 2.3333333333333335)
    """
    limited = select_fp8_operands(metrics)
    found = (
        []
        if limited.is_empty()
        else map_tensor_chunks(partial(map_grid_slices, partial(_beyond, least)), limited, together=[COLUMNS])
    )
    rows = [row for of_block in found for of_part in of_block for row in of_part]
    schema = {"layer": pl.String, "role": pl.String, "onset": pl.Int64, "excess": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row").sort("onset", -pl.col("excess"), maintain_order=True)


def _beyond(least: float, grid: MetricGrid) -> list[tuple[str, str, int, float]]:
    times = times_of_limits(grid)
    strength = strengths(times)
    found = []
    for i in np.flatnonzero((strength > least).any(axis=1)):
        at = first = int(np.argmax(strength[i] > least))
        while at > 0 and times[i, at - 1] > least:
            at -= 1
        layer, role = grid.tensors.row(int(i))
        found.append((layer, role, int(grid.steps[at]), float(strength[i, first:].max())))
    return found


def select_fp8_operands(metrics: MetricsTable) -> MetricsTable:
    """Keep the rows of operands in FP8, because only these have limits."""
    return metrics.filter_rows("format", FORMATS) if "format" in metrics.columns else metrics


def strengths(times: Floats) -> Floats:
    """Return a strength for each sample, [T, S]: above 1 if this and the previous sample exceed a limit, or if this sample
    exceeds a limit by far.

    The first samples have initial scales and get 0. The strength does not depend on later samples.
    """
    judged = times[:, MADE_UP:]
    before = np.concatenate([np.zeros((len(times), 1)), judged[:, :-1]], axis=1)[:, : judged.shape[1]]
    strength = np.fmax(np.fmin(judged, before), judged / FAR)
    return np.concatenate([np.zeros((len(times), times.shape[1] - judged.shape[1])), strength], axis=1)


def times_of_limits(grid: MetricGrid) -> Floats:
    """Return the largest multiple of a limit over all metrics, for each operand and sample, [T, S]; 0 if all are unknown."""
    roles = grid.tensors["role"].to_list()
    with np.errstate(divide="ignore"):
        least = 100 * LEAST_VALUES / grid.read_metric("n")
    limits = {metric: _limits(metric, roles)[:, None] for metric in LIMITS["input"]}
    limits |= {metric: np.fmax(limit, least) for metric, limit in limits.items() if metric.endswith("_pct")}
    shown = [np.abs(grid.read_metric(metric)) / limit for metric, limit in limits.items()]
    times: Floats = np.nan_to_num(np.fmax.reduce(shown), posinf=np.inf)
    return times


def _limits(metric: str, roles: Sequence[str]) -> Floats:
    """Return the limit of a metric for each role, [T]; NaN for roles without limits."""
    return np.array([LIMITS[role][metric] if role in LIMITS else np.nan for role in roles])


def compute_early_warning_scores(run: Run, beyond: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the early-warning score of each sample, and the operand that has this score.

    A score depends only on the sample and the previous sample, so the trigger `early_warning` can compute the score during
    the run. Only operands in FP8 have limits and scores.

    Args:
        beyond: the result of `find_operands_over_limit` for the run, if known. Then only these operands are read,
            because no other operand has a score above 1.

    Returns:
        A table with step, score, layer and role. The score is the multiple of a limit that the worst operand reaches in both
        this and the previous sample, or a third of its multiple in this sample alone if this is larger. A score above 1 is a
        warning. The first samples have initial scales and no score.

    Example:
        >>> scores = compute_early_warning_scores(Run.read("runs/bad"))
        >>> scores.columns, scores["score"].max() > 1
        (['step', 'score', 'layer', 'role'], True)
    """
    limited = select_fp8_operands(select_quantized_operands(run.metrics))
    judged = limited.select_tensors(split_off_single_experts(limited.tensors)[0])
    if beyond is not None:  # keep all steps, because a score depends on the previous sample
        judged = judged.select_tensors_at_all_steps(
            judged.tensors.join(beyond, on=["layer", "role"], how="semi", maintain_order="left")
        )
    empty = pl.DataFrame(schema={"step": pl.Int64, "score": pl.Float64, "layer": pl.String, "role": pl.String})
    if judged.is_empty() or judged.tensors.is_empty():
        return empty
    found = [
        rows
        for block in map_tensor_chunks(partial(map_grid_slices, _farthest), judged, together=[COLUMNS])
        for rows in block
    ]
    # If several operands have the same score, the first counts.
    return pl.concat([empty, *found]).sort("step", -pl.col("score"), maintain_order=True).unique("step", maintain_order=True)


def _farthest(grid: MetricGrid) -> pl.DataFrame:
    """Return step, score, layer and role of the worst operand in each sample."""
    times = strengths(times_of_limits(grid))[:, MADE_UP:]
    worst = np.argmax(times, axis=0)
    columns = {"step": grid.steps[MADE_UP:], "score": times[worst, np.arange(times.shape[1])]}
    return pl.DataFrame(columns, schema={"step": pl.Int64, "score": pl.Float64}).hstack(grid.tensors[worst.tolist()])
