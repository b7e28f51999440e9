"""Is what a step adds to a weight far too large for it, or nothing at all?

Adam's first steps aside, a step changes a weight by about a thousandth of its size. A learning rate of one parameter group
that is off, or a gradient that arrives at one layer alone multiplied, shows here and in no operand.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from ...formatting import number
from ...runs.run import Run
from .finding import Finding
from .rises import Course, courses

#: part of a weight that a step may change; times the baseline's, or the other layers' rise, that count
_LARGE, _TIMES = 0.1, 4.0
_ADVICE = (
    "Look at the learning rate of this weight's parameter group, at its gradient, and, if it stands still, at whether its "
    "dtype can hold such small steps."
)


def steps_of_weights(run: Run, baseline: Run | None) -> list[Finding]:
    """The first weight whose steps are off; nothing if the record has no steps of weights."""
    mine, theirs = _steps(run), None if baseline is None else _steps(baseline)
    if mine.is_empty() or (theirs is not None and theirs.is_empty()):
        return []
    return [*_off(mine, theirs, run.unit), *_still(run, mine, theirs)]


def _steps(run: Run) -> pl.DataFrame:
    rows = run.table("states").filter(pl.col("role") == "update", pl.col("scale_source") != "what-if")
    return rows.filter(~pl.col("step").is_in(run.made_up_for.implode()))


def _off(mine: pl.DataFrame, theirs: pl.DataFrame | None, unit: str) -> list[Finding]:
    found = [
        (at, course)
        for course in courses(mine, theirs, "update_to_weight")
        if (at := course.since(_is_off(course))) is not None
    ]
    if not found:
        return []
    at, course = min(found, key=lambda each: each[1].steps[each[0]])
    since, value, usual = int(course.steps[at]), float(course.values[at]), float(course.usual.max())
    told = (
        f"a step changes W of {course.layer} by {number(100 * value)}% of its size at {unit} {since}, "
        f"{number(value / usual)} times the largest of {'the beginning' if theirs is None else 'the baseline'}"
    )
    told += f"; so it is of {len(found) - 1} more weights" if len(found) > 1 else ", and no other weight so"
    return [Finding("steps of weights", "step_size", "medium", told, _ADVICE, course.layer, "update", since, True)]


def _is_off(course: Course) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    limit = max(_TIMES * float(course.usual.max()), _LARGE)
    out: np.ndarray[tuple[int], np.dtype[np.bool_]] = course.values > limit
    return out


def _still(run: Run, mine: pl.DataFrame, theirs: pl.DataFrame | None) -> list[Finding]:
    """A weight that a step leaves as it is, although it has a gradient and the learning rate is not zero."""
    if theirs is not None:
        theirs = theirs.filter(norm=0.0).select("layer").unique()
        mine = mine.join(theirs, on="layer", how="anti", maintain_order="left")
    gradients = run.table("states").filter(pl.col("role") == "weight_gradient", pl.col("scale_source") != "what-if")
    moved = gradients.filter(pl.col("norm") > 0).select("step", "layer")
    rates = run.steps.filter(pl.col("lr") > 0).select("step")
    still = mine.filter(norm=0.0).join(moved, on=["step", "layer"], how="semi", maintain_order="left")
    still = still.join(rates, on="step", how="semi", maintain_order="left")
    often = still.group_by("layer", maintain_order=True).agg(pl.col("step").min(), n=pl.len()).filter(pl.col("n") > 1)
    if often.is_empty():
        return []
    row = often.sort("step", maintain_order=True).row(0, named=True)
    told = (
        f"W of {row['layer']} stands still in {row['n']} sampled steps, first at {run.unit} {row['step']}, although it has "
        "a gradient and the learning rate is above 0"
    )
    told += f"; so do {len(often) - 1} more weights" if len(often) > 1 else ""
    return [Finding("steps of weights", "step_size", "medium", told, _ADVICE, row["layer"], "update", row["step"], True)]
