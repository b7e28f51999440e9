"""Which operands are looked into, and why each is out of the band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from ...core.keys import GRADIENTS
from ...core.layer_names import aggregate_of, is_aggregate
from ...core.scale_sources import QUANTIZED
from ..bands.judge import Judged
from ..comparison.compare import quantized, split_experts
from ..comparison.comparison import Comparison
from ..comparison.onset import IN_A_ROW, onsets
from ..formatting import number
from ..runs.casts import usual_casts
from ..runs.median_of import median_of
from ..runs.metrics import Metrics
from ..runs.run import Run
from .rules.beyond import beyond
from .rules.finding import Finding
from .rules.operand import BEHIND, COURSE, Course, severity, why

#: operands that are looked into
_LOOKED_INTO = 8
#: part of the strongest excess that makes another strong too: of those the first in time counts. Gradients, which follow
#: from much, make no X or W weak
_STRONG = 0.2
#: part of a run's samples that the rest is compared with where there is no baseline, and how many those must be
_BEGINNING, _FEW = 0.25, 6
_KEY = ["layer", "role"]
#: samples behind the onset of all experts as one in which one of them must be out, and how many times the next one's its
#: excess must be, to be the one that it is about
_SOON, _OUTSTANDING = 2, 3.0
#: samples by which an operand may move before it is beyond what is healthy
_BEFORE = 4
#: bits by which operands of a role stand apart where all is well
_OTHERS = 4.0
#: metrics that no recipe changes
_OF_VALUES = ("nonfinite", "outlier_log2")
#: metrics that say how many values are lost, and what they are called
_LOST = {"underflow_pct": "underflow", "overflow_pct": "overflow"}
#: times the least rise that counts, from which gradients of other batches are more than a hint by their values
_FAR = 8.0
#: causes that need no other run to be seen
_PLAIN = ("nonfinite", "dead")


def against_baseline(comparison: Comparison) -> list[Finding]:
    """Why operands are out of a baseline's band: strong ones by onset, then others."""
    run, baseline = comparison.run, comparison.baseline
    looked_into, found = [], []
    for layer, role, since, excess, samples in _first(_comparable(comparison), run):
        if (expert := _outstanding(comparison.experts_out_of_band, run, layer, role, since)) is not None:
            layer, since, excess = expert
        looked_into.append((layer, role, since, excess, samples))
    rows = [_rows(each.metrics, looked_into) for each in (run, baseline)]
    steps, end = run.metrics.steps, baseline.metrics.steps[-1]
    for layer, role, since, excess, samples in looked_into:
        course = Course.of(rows[0], layer, role)
        cause = why(course, since, Course.of(rows[1], layer, role), samples)
        if samples < IN_A_ROW and cause.cause != "nonfinite":
            # Where the baseline ends before the run, nobody knows for how long it lasts.
            lasts = steps[-1] > end and int(((steps >= since) & (steps <= end)).sum()) <= samples
            cause = _as_transient(cause, None if lasts else samples)
        cause = _that_grew(cause, comparison.out_of_band)
        cause = _of_other_batches(replace(cause, excess=excess), comparison)
        found.append(replace(cause, severity=severity(course, since)))
    # What the run alone has, or the run alone in FP8, has nothing to be compared with.
    only = run.metrics.outside(baseline.metrics.tensors)
    far = split_experts(beyond(quantized(only)))[0]
    found += [replace(f, confidence="medium") for f in (_alone(run, far) if len(far) else [])]
    return _that_count(run, found)


def _rows(metrics: Metrics, operands: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """What courses of some operands are made of.

    Args:
        operands: layer, role, and whatever.
    """
    keys = pl.DataFrame([each[:2] for each in operands], dict.fromkeys(_KEY, pl.String), orient="row").unique()
    return metrics.within(keys).frame(COURSE)


def _as_transient(found: Finding, samples: int | None) -> Finding:
    """A batch may have far larger gradients than others, which a scale lags behind: no more than a hint.

    Args:
        samples: for how many the operand is out; None: nobody knows.
    """
    told = found.evidence
    if samples is not None:
        told += f"; it lasts for {samples} sample{'s' if samples > 1 else ''}, a transient"
    lags = found.role in GRADIENTS and found.cause in ("clipping", "underflow")
    return replace(found, evidence=told, confidence="low" if lags else found.confidence)


def _that_grew(found: Finding, out_of_band: pl.DataFrame) -> Finding:
    """An outlier that costs no values yet, and does later, is more than a hint."""
    lost = out_of_band.filter(pl.col("metric").is_in(_LOST), layer=found.layer, role=found.role)
    if (found.cause, found.confidence) != ("outlier", "low") or lost.is_empty():
        return found
    row = lost.sort("onset").row(0, named=True)
    more = f"{_LOST[row['metric']]} {number(row['value'], '%')} instead of {number(row['expected'], '%')}"
    return replace(found, evidence=f"{found.evidence}; from {row['onset']} on {more}", confidence="high")


def _of_other_batches(found: Finding, comparison: Comparison) -> Finding:
    """Gradients that are held worse because of their values are no more than a hint, unless they are far out: those of a
    cross-attention differ by nearly as much from seed to seed."""
    gap = comparison.loss.gap
    by_values = found.role in GRADIENTS and found.may_follow_the_loss and found.cause not in _PLAIN
    if not by_values or (gap is not None and gap.paired) or (found.excess or 0.0) >= _FAR:
        return found
    return replace(found, confidence="low")


def _comparable(comparison: Comparison) -> pl.DataFrame:
    """What is out of the band of the baseline, without what another recipe brings about.

    An operand that is cast under another recipe than in the baseline, or was not cast there, has other errors and scales. It
    counts if its values stand out, or if it is beyond what any healthy one does.
    """
    mine, theirs = (usual_casts(run.metrics) for run in (comparison.run, comparison.baseline))
    both = mine.join(theirs, on=_KEY, suffix="_baseline")
    alike = both.filter(pl.struct("recipe", "cast") == pl.struct(recipe="recipe_baseline", cast="cast_baseline"))
    rows, run = comparison.out_of_band, comparison.run
    others = rows.join(alike, on=_KEY, how="anti", maintain_order="left")
    if others.is_empty():
        return rows
    far = beyond(quantized(run.metrics.within(others)))
    counts = pl.concat([alike.select(_KEY), far.select(_KEY)])
    known = counts.select(operand=pl.struct(_KEY))["operand"].implode()
    return rows.filter(pl.col("metric").is_in(_OF_VALUES) | pl.struct(_KEY).is_in(known))


def alone(run: Run, judged: Judged | None = None) -> list[Finding]:
    """What operands of a run without a baseline show.

    Those that are beyond the bands of healthy runs, or beyond what any healthy operand does, come first, with medium
    confidence. That one that has no band is not what it was in the run's first quarter, where it warms up, is a hint.

    Args:
        judged: against bands; None: there are none for such a run.
    """
    usual, quantized_ones = beginning(run.metrics), quantized(run.metrics)
    far = split_experts(_beyond(quantized_ones, judged))[0]
    moved = split_experts(onsets(usual, quantized_ones if not usual.is_empty() else usual))[0]
    far = _begun(far, moved, run)
    moved = moved.join(far, on=_KEY, how="anti", maintain_order="left")
    if judged is not None:
        moved = moved.join(judged.covered, on=_KEY, how="anti", maintain_order="left")
    surely = [replace(f, confidence="medium") for f in _alone(run, far)]
    hints = [f if f.cause in _PLAIN else replace(f, confidence="low") for f in _alone(run, moved)]
    return _that_count(run, [*surely, *hints][:_LOOKED_INTO])


def shared_with(run: Run, baseline: Run) -> list[Finding]:
    """Return operands that are beyond what any healthy one does in a run and in its baseline, so that no band shows them."""
    far = split_experts(beyond(quantized(run.metrics)))[0]
    theirs = beyond(quantized(baseline.metrics.within(far.select(_KEY)))) if len(far) else far
    both = far.join(theirs, on=_KEY, how="semi", maintain_order="left")
    return _that_count(run, _alone(run, both) if len(both) else [])


def _beyond(metrics: Metrics, judged: Judged | None) -> pl.DataFrame:
    """Operands beyond fixed limits or bands; of both, the earlier onset."""
    far = [beyond(metrics)]
    if judged is not None:
        far.append(judged.beyond.join(metrics.tensors, on=_KEY, how="semi", maintain_order="left"))
    each = pl.concat([rows.select(*_KEY, "onset", "excess") for rows in far]).group_by(_KEY, maintain_order=True)
    return each.agg(pl.col("onset").min(), pl.col("excess").max()).sort("onset", -pl.col("excess"), maintain_order=True)


def _begun(far: pl.DataFrame, moved: pl.DataFrame, run: Run) -> pl.DataFrame:
    """Operands beyond what is healthy, since when they moved away from what they were, if that is a few samples before."""
    samples = {step: i for i, step in enumerate(run.metrics.steps.tolist())}
    before = moved.group_by(_KEY).agg(moved=pl.col("onset").min())
    joined = far.join(before, on=_KEY, how="left", maintain_order="left")
    places = [pl.col(name).replace_strict(samples, default=None, return_dtype=pl.Int64) for name in ("onset", "moved")]
    soon = (places[0] - places[1]).is_between(0, _BEFORE)
    return joined.with_columns(onset=pl.when(soon).then("moved").otherwise("onset")).drop("moved").sort("onset")


def _outstanding(experts: pl.DataFrame, run: Run, layer: str, role: str, since: int) -> tuple[str, int, float] | None:
    """The expert by which all experts of a layer as one are out of the band: name, onset, excess; None: several are alike.

    Args:
        experts: of them those that are out, each by itself.
    """
    if not is_aggregate(layer) or experts.is_empty():
        return None
    samples = run.metrics.steps
    soon = max(samples[samples > since][:_SOON].tolist(), default=None)
    of_layer = pl.col("layer").map_elements(aggregate_of, pl.String) == layer
    rows = experts.filter(pl.col("role") == role, pl.col("onset") <= (since if soon is None else soon)).filter(of_layer)
    each = rows.group_by("layer").agg(pl.col("onset").min(), pl.col("excess").max()).sort("excess", descending=True)
    alone = len(each) == 1 or (len(each) > 1 and each["excess"][0] > _OUTSTANDING * each["excess"][1])
    return (each["layer"][0], each["onset"][0], each["excess"][0]) if alone else None


def _alone(run: Run, rows: pl.DataFrame) -> list[Finding]:
    found, first = [], _first(rows, run)
    usual = {role: _of_others(run, role) for role in {role for _, role, *_ in first}}
    rows = _rows(run.metrics, first)
    for layer, role, since, excess, _ in first:
        course = Course.of(rows, layer, role)
        cause = why(course, since, outlier=usual[role])
        found.append(replace(cause, excess=excess, severity=severity(course, since)))
    return found


def _of_others(run: Run, role: str) -> float:
    """How high the largest value may stand above the median, in bits, from what operands of a role have in this run."""
    return median_of(run.metrics.with_role(role), "outlier_log2") + _OTHERS


def beginning(metrics: Metrics) -> Metrics:
    """The first samples, spread over the whole run; none where they are too few to know what is usual."""
    n = round(len(metrics.steps) * _BEGINNING)
    if n < _FEW:
        return metrics.over(metrics.steps[:0])
    first = pl.Series("step", metrics.steps[:n])
    stretch = (metrics.steps[-1] - metrics.steps[0]) / (metrics.steps[n - 1] - metrics.steps[0])
    spread = (pl.lit(metrics.steps[0]) + (pl.col("step") - metrics.steps[0]) * stretch).round().cast(pl.Int64)
    return metrics.along(first.to_frame().select("step", sample=spread))


def _first(out_of_band: pl.DataFrame, run: Run) -> list[tuple[str, str, int, float, int]]:
    """layer, role, onset, excess, samples in a row: of strong ones by onset, and of others, as many as are looked into."""
    lasting = pl.col("samples").max() if "samples" in out_of_band.columns else pl.lit(BEHIND)
    groups = out_of_band.group_by(_KEY, maintain_order=True)
    tensors = groups.agg(pl.col("onset").min(), pl.col("excess").max(), samples=lasting)
    tensors = tensors.join(_order(run, tensors), on=[*_KEY, "onset"], how="left", maintain_order="left")
    is_gradient = pl.col("role").is_in(GRADIENTS)
    strongest = pl.when(is_gradient).then(pl.col("excess").max()).otherwise(pl.col("excess").filter(~is_gradient).max())
    tensors = tensors.with_columns(weak=pl.col("excess") < _STRONG * strongest)
    ordered = tensors.sort("weak", "onset", -pl.col("excess"), "order", nulls_last=True, maintain_order=True)
    return ordered.head(_LOOKED_INTO).select(*_KEY, "onset", "excess", "samples").rows()


def _order(run: Run, tensors: pl.DataFrame) -> pl.DataFrame:
    """layer, role, onset, order: of those whose values are NaN or infinite at the onset, in the order of execution."""
    metrics, column = run.metrics.within(tensors), "nonfinite_order"
    wanted = metrics.tensors.with_row_index("tensor").join(tensors, on=_KEY).select(pl.col("tensor").cast(pl.Int64), "onset")

    def those(rows: pl.DataFrame) -> pl.DataFrame:
        known = rows.drop_nulls(column)
        return known.join(wanted, left_on=["tensor", "step"], right_on=["tensor", "onset"], how="semi")

    return metrics.named(metrics.gathered([column], those)).select(*_KEY, onset="step", order=column)


def _that_count(run: Run, found: list[Finding]) -> list[Finding]:
    """Without what a recipe would make of operands, which has done no harm; NaN behind the loss is less sure."""
    lost = run.loss.steps[~np.isfinite(run.loss.losses)]
    found = [_behind_the_loss(f, int(lost[0])) if len(lost) else f for f in found]
    return found if run.quantization == QUANTIZED else [f for f in found if f.cause in _PLAIN]


def with_zeros(operands: Sequence[Finding], zeros: Sequence[Finding]) -> list[Finding]:
    """Add the findings of zeros, each before those of operands that went wrong at later samples.

    Of one sample the others come first: a scale that went wrong makes zeros, and zeros make no scale go wrong.
    """
    merged, named = list(operands), {(f.layer, f.role) for f in operands if f.cause == "dead"}
    for zero in zeros[:_LOOKED_INTO]:
        if (zero.layer, zero.role) not in named:
            later = (i for i, f in enumerate(merged) if (f.since or 0) > (zero.since or 0))
            merged.insert(next(later, len(merged)), zero)
    return merged


def _behind_the_loss(found: Finding, lost: int) -> Finding:
    """NaN from a step on at which the loss was NaN already is everywhere."""
    if found.cause != "nonfinite" or found.since is None or found.since <= lost:
        return found
    return replace(found, confidence="low", may_follow_the_loss=True)
