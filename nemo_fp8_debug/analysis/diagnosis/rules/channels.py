"""Did a channel between GEMMs stand out before the culprit's values did, or before the loss diverged?

Outliers of an operand often come from one channel of the residual stream, which each block passes on. Where nothing else is
wrong, one that stands out only in the run and not in its baseline is told too: it may be what comes first.
"""

from __future__ import annotations

import polars as pl

from ....core.keys import SHOWN_AS
from ...formatting import number
from ...runs.run import Run
from .finding import Finding
from .rises import courses

#: times what is usual, and times the median channel, that a channel must stand out
_GROWS, _STANDS_OUT = 3.0, 8.0
_ROLES = ("norm_input", "norm_output")


def channels(run: Run, baseline: Run | None, culprit: Finding | None, harmed_since: int | None) -> Finding | None:
    """The first channel that stands out by the time that something goes wrong; None: none does, or no norms are recorded.

    Args:
        culprit: an operand whose values or scale are off; None: there is none, and the loss counts.
        harmed_since: step from which the run is harmed; None: it is not.
    """
    until, what = (harmed_since, "the loss") if culprit is None else (culprit.since, culprit.operand)
    if until is None and baseline is None:
        return None  # channels grow in runs that go well, too
    mine, theirs = (None if each is None else _norms(each) for each in (run, baseline))
    assert mine is not None
    found = []
    for role in _ROLES:
        others = None if theirs is None else theirs.filter(role=role)
        for course in courses(mine.filter(role=role), others, "channel_ratio"):
            out = (course.values > _GROWS * course.usual.max()) & (course.values > _STANDS_OUT)
            if (at := course.since(out)) is not None and (until is None or course.steps[at] <= until):
                found.append((int(course.steps[at]), role, course, at))
    if not found:
        return None
    since, role, course, at = min(found, key=lambda each: each[0])
    channel = mine.filter(layer=course.layer, role=role, step=since)["channel"][0]
    told = (
        f"channel {channel:.0f} of the {SHOWN_AS[role]} of {course.layer} is {number(float(course.values[at]))} times the "
        f"median channel at {run.unit} {since}, usually {number(float(course.usual.max()))} at the most"
    )
    if until is not None:
        told += f": {f'{until - since} {run.unit}s before' if until > since else 'with'} {what}"
    return Finding("channels", "outlier", "low", told, "", course.layer, role, since, True)


def _norms(run: Run) -> pl.DataFrame:
    rows = run.table("activations").filter(pl.col("scale_source") != "what-if", pl.col("role").is_in(_ROLES))
    return rows.filter(~pl.col("step").is_in(run.made_up_for.implode()))
