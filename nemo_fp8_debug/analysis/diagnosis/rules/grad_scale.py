"""Is dY multiplied by what it should be? Metrics in units of the loss, and FP8's range, both depend on it."""

from __future__ import annotations

import numpy as np
import polars as pl

from ...runs.grid import Floats
from ...runs.run import Run
from .finding import Finding

#: a factor between multipliers that counts
_FACTOR = 1.5
#: a loss scale that hardly another factor comes to, and how near to it that must be to be it
_LARGE, _EXACT = 2.0**6, 1.01
#: samples in a row that count
_IN_A_ROW = 3
#: what a multiplier may be below the loss scale for accumulation and averaging over ranks
_LEAST_SHARE = 2.0**-14
#: columns of `_known` that a fault moves, each in the units of another way to accumulate: gradients of micro-batches are
#: averaged or summed
_UNITS = ("per_scale", "per_micro_batch")


def multiplier(run: Run, baseline: Run | None = None) -> list[Finding]:
    """ErrorGuard of what gradients are multiplied by; none where that is not known, or loss scale or accumulation tells
    why."""
    mine, theirs = _known(run), None if baseline is None else _known(baseline)
    if mine.is_empty():
        return []
    theirs = None if theirs is None or theirs.is_empty() else theirs
    return [*_against_the_loss_scale(mine, theirs), *_moved(mine, theirs), *_against_the_good_run(mine, theirs)]


def _known(run: Run) -> pl.DataFrame:
    """step, grad_scale, loss_scale, per_scale and per_micro_batch of the samples that can be judged.

    Hosts report a loss scale from before or after it moved, so steps beside such a move cannot be.
    """
    rows = run.steps.sort("step").with_columns(pl.col("grad_scale", "loss_scale").fill_nan(None))
    if rows["loss_scale"].is_not_null().any():
        scale = pl.col("loss_scale")
        steady = (scale == scale.shift(1)).fill_null(True) & (scale == scale.shift(-1)).fill_null(True)
        rows = rows.filter(scale.is_not_null()).filter(steady & scale.is_finite() & (scale > 0))
    rows = rows.filter(pl.col("grad_scale").is_finite())
    calls = run.metrics.with_role("grad_output").gathered(["calls"], _median_of_steps)
    gradients = calls.select("step", "calls")
    per_scale = pl.col("grad_scale") / pl.col("loss_scale").fill_null(1.0)
    known = rows.join(gradients, on="step", how="left").with_columns(per_scale=per_scale)
    per_micro_batch = pl.col("per_scale") * pl.col("calls").fill_null(1.0)
    return known.with_columns(per_micro_batch=per_micro_batch).sort("step")


def _median_of_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """A step's rows come together."""
    return rows.group_by("step").agg(pl.col("calls").cast(pl.Float64).median())


def _against_the_loss_scale(mine: pl.DataFrame, theirs: pl.DataFrame | None) -> list[Finding]:
    scaled = mine.filter(pl.col("loss_scale") > _FACTOR)
    if scaled.is_empty() or (theirs is not None and _alike(mine, theirs)):
        return []
    share, scale = _median(scaled["per_scale"].abs()), _median(scaled["loss_scale"])
    if _LEAST_SHARE <= share <= _FACTOR:
        return []
    facts = f"gradients are multiplied by {share * scale:.3g}, and a loss scale of {scale:.3g} is reported (medians)"
    since = int(scaled["step"][0])
    if share < _LEAST_SHARE:
        return [_found("high", facts, "The loss scale that is reported is not applied.", since, share)]
    if not _differ(share, scale):
        return [_found("high", facts, "The loss scale is applied twice.", since)]
    return [_found("low", facts, "A loss that is summed over tokens explains that; otherwise it is scaled twice.", since)]


def _moved(mine: pl.DataFrame, theirs: pl.DataFrame | None) -> list[Finding]:
    """For baseline, with nothing that tells why."""
    places = [_leaves(mine[unit].to_numpy()) for unit in _UNITS]
    if None in places or (theirs is not None and None not in [_leaves(theirs[unit].to_numpy()) for unit in _UNITS]):
        return []
    values = mine["per_scale"].to_numpy()
    usual = _usual(values)
    at = max(place for place in places if place is not None)
    step = int(mine["step"][at])
    facts = (
        f"the gradients' multiplier is {values[at]:.3g} of the loss scale from step {step} on and was "
        f"{usual:.3g}, and neither the loss scale nor accumulation tells why"
    )
    advice = "Look at what divides the loss: accumulation, tokens, data-parallel averaging."
    return [_found("high", facts, advice, step, values[at] / usual if usual else np.inf)]


def _leaves(values: Floats) -> int | None:
    """From where on all values are off those of the beginning; None: nowhere, or they have never been steady."""
    usual = _usual(values)
    off = np.array([_differ(value, usual) for value in values], dtype=bool)
    if len(values) < 2 * _IN_A_ROW or off[: _beginning(values)].any():
        return None
    back = np.flatnonzero(~off)
    start = int(back[-1]) + 1
    return start if start <= len(values) - _IN_A_ROW else None


def _beginning(values: Floats) -> int:
    return max(_IN_A_ROW, len(values) // 4)


def _usual(values: Floats) -> float:
    return float(np.median(values[: _beginning(values)]))


def _against_the_good_run(mine: pl.DataFrame, theirs: pl.DataFrame | None) -> list[Finding]:
    if theirs is None or _alike(mine, theirs):
        return []
    here, there = (_median(rows["per_scale"]) for rows in (mine, theirs))
    facts = f"gradients are multiplied by {here:.3g} of the loss scale here and by {there:.3g} of it in the baseline"
    scale = common_loss_scale(mine, theirs)
    if scale is not None and here != 0 and not _differ(here * scale, there, _EXACT):
        facts += f", and a loss scale of {scale:.3g} is reported of both"
        return [_found("high", facts, "The loss scale that is reported is not applied.", int(mine["step"][0]), 1 / scale)]
    advice = "Other numbers of ranks or tokens explain that; otherwise the loss is divided twice, or not at all."
    return [_found("low", facts, advice, int(mine["step"][0]))]


def _alike(mine: pl.DataFrame, theirs: pl.DataFrame) -> bool:
    return any(not _differ(_median(mine[unit]), _median(theirs[unit])) for unit in _UNITS)


def common_loss_scale(mine: pl.DataFrame, theirs: pl.DataFrame) -> float | None:
    """The median loss scale of two runs, if that is the same and so large that hardly another factor comes to as much."""
    scales = [rows["loss_scale"].fill_nan(None).median() for rows in (mine, theirs)]
    here, there = (scale if isinstance(scale, float) else 0.0 for scale in scales)
    return here if here == there and here >= _LARGE else None


def _differ(value: float, usual: float, factor: float = _FACTOR) -> bool:
    """By a factor, in sign, or in being zero."""
    if value == 0 or usual == 0:
        return value != usual
    ratio = value / usual
    return ratio <= 0 or bool(abs(np.log2(ratio)) > np.log2(factor))


def _median(values: pl.Series) -> float:
    median = values.median()
    assert isinstance(median, float)
    return median


def _found(confidence: str, evidence: str, advice: str, since: int, factor: float = 1.0) -> Finding:
    severity = severity_of(factor)
    return Finding("multiplier", "multiplier", confidence, evidence, advice, since=since, severity=severity)


def severity_of(factor: float) -> int:
    """Of gradients that are multiplied by a factor. Runs of the benchmark clip, which undoes a factor above 1 alone."""
    return 2 if abs(factor) < 1 else 0
