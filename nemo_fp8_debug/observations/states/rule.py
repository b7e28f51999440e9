"""Rules about optimizer states: weight steps that are far too large, or lost in rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from ...analysis import thresholds
from ...analysis.diagnosis.courses import LayerTimeline, build_layer_timelines
from ...analysis.diagnosis.facts import DiagnosedRecords, Facts, define_fact, subtract_baseline_tensors
from ...analysis.diagnosis.finding import Finding
from ...analysis.diagnosis.rule import register_rule
from ...analysis.diagnosis.rules.nonfinite import OPTIMIZER, WEIGHT_GRADIENT, FirstNonfinite
from ...analysis.runs.metrics import IS_NONFINITE
from ...analysis.runs.run import Run
from ...core.keys import SHOWN_AS, STATES
from ...core.text import format_number
from ..products.rule import compute_percentages
from .table import TABLES

#: names of the parts of a step's error
_OF_UPDATE = {
    "error_of_weight_gradient": "of dW",
    "error_of_first_moment": "of m",
    "error_of_second_moment": "of v",
    "error_of_weight": "of the rounding of W",
}


@define_fact
def weight_steps(records: DiagnosedRecords) -> list[LayerTimeline]:
    """Return the relative size of each weight's steps, sample by sample."""
    mine, theirs = (None if each is None else _read(each, "update") for each in (records.run, records.baseline))
    assert mine is not None
    if mine.is_empty() or (theirs is not None and theirs.is_empty()):
        return []
    return build_layer_timelines(mine, theirs, "update_to_weight")


@define_fact
def lost_steps(records: DiagnosedRecords) -> pl.DataFrame:
    """Return weights that do not change in a step although they have a gradient: layer, first such step, and count n.

    Steps without a learning rate do not count. Weights that do not change in the baseline do not count either.
    """
    mine = subtract_baseline_tensors(
        lambda run: _read(run, "update").filter(norm=0.0), records.run, records.baseline, ["layer"]
    )
    moved = _read(records.run, "weight_gradient").filter(pl.col("norm") > 0).select("step", "layer")
    rates = records.run.steps.filter(pl.col("lr") > 0).select("step")
    still = mine.join(moved, on=["step", "layer"], how="semi", maintain_order="left")
    still = still.join(rates, on="step", how="semi", maintain_order="left")
    return still.group_by("layer", maintain_order=True).agg(pl.col("step").min(), n=pl.len()).filter(pl.col("n") > 1)


@register_rule("weight steps", ("step_size", "frozen_weights"), (weight_steps, lost_steps), event="weights")
def find_weight_steps(facts: Facts) -> Iterator[Finding]:
    """Name the first weight whose steps are far too large, or lost in rounding.

    Example: one parameter group has a learning rate of 3, so each step changes W of layers.2.fc1 by 40% of its size.
    """
    found = [(first, each) for each in weight_steps(facts) if (first := each.find_lasting_exit(_is_off(each))) is not None]
    if found:
        first, course = min(found, key=lambda each: each[1].steps[each[0]])
        since, value, usual = int(course.steps[first]), float(course.values[first]), float(course.usual.max())
        evidence = (
            f"a step changes W of {course.layer} by {format_number(100 * value)}% of its size at {facts.unit} {since}, "
            f"{format_number(value / usual)} times the largest of {'the baseline' if facts.paired else 'the beginning'}"
        )
        evidence += f"; {len(found) - 1} more weights do so" if len(found) > 1 else ""
        yield Finding("weight steps", "step_size", "clear", evidence, course.layer, "update", since)
    lost = lost_steps(facts).sort("step", maintain_order=True)
    if len(lost):
        row = lost.row(0, named=True)
        evidence = (
            f"W of {row['layer']} stands still in {row['n']} sampled steps, first at {facts.unit} {row['step']}, although "
            "it has a gradient and the learning rate is above 0"
        )
        evidence += f"; so do {len(lost) - 1} more weights" if len(lost) > 1 else ""
        yield Finding("weight steps", "frozen_weights", "clear", evidence, row["layer"], "update", row["step"])


def _is_off(course: LayerTimeline) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    limit = max(thresholds.TIMES_USUAL * float(course.usual.max()), thresholds.STEP_LARGE)
    out: np.ndarray[tuple[int], np.dtype[np.bool_]] = course.values > limit
    return out


def _read(run: Run, *roles: str) -> pl.DataFrame:
    rows = run.read_table(TABLES[0].name).filter(pl.col("scale_source") != "what-if")
    rows = rows.filter(pl.col("role").is_in(roles)) if roles else rows
    return rows.filter(~pl.col("step").is_in(run.loss_scale_skips.implode()))


def find_nonfinite(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    """Return the first NaN or infinity in gradients and optimizer states, unless the baseline has it too."""
    rows = subtract_baseline_tensors(lambda each: _read(each).filter(IS_NONFINITE), run, baseline)
    if rows.is_empty():
        return []
    order = pl.col("role").replace_strict({role: i for i, role in enumerate(STATES)}, return_dtype=pl.Int64)
    first = rows.sort("step", order, maintain_order=True).row(0, named=True)
    place = WEIGHT_GRADIENT if first["role"] == "weight_gradient" else OPTIMIZER
    name = f"{SHOWN_AS[first['role']]} of {first['layer']}"
    return [FirstNonfinite(int(first["step"]), (place, 0), name, first["layer"], first["role"])]


def describe_culprit(found: Finding, records: DiagnosedRecords) -> Iterator[str]:
    """Describe what causes the errors in the steps of the culprit's weight.

    Args:
        found: a finding about an operand.
    """
    rows = _read(records.run, "update").filter(layer=found.layer).filter(pl.col("step") >= (found.since or 0))
    rows = rows.filter(pl.col("update_error").is_not_null())
    if rows.is_empty():
        return
    # Samples in which the gradient's part is unknown would make the other parts look larger.
    rows = known if len(known := rows.drop_nulls("error_of_weight_gradient")) else rows
    squares = {what: (rows[name] ** 2).mean() for name, what in _OF_UPDATE.items()}
    parts = {what: float(value) for what, value in squares.items() if isinstance(value, float)}
    both = (rows["update_error"] ** 2).mean()
    assert isinstance(both, float)
    shares = compute_percentages(parts | {"joint": both - sum(parts.values())})
    if shares:
        told = ", ".join(f"{share:.0f}% {what}" for what, share in shares.items())
        without = "" if "of dW" in shares else " (the part of dW is not known)"
        yield f"the error of the step of W is {told}{without}"
