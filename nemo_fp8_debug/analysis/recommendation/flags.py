"""Which operands a diagnosis asks to change, why, and in which steps they were out of order."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ...core.keys import Key
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.ranking import harm_ranks
from ..diagnosis.rules.finding import NO_RECIPE, NOT_FP8
from ..formatting import number


@dataclass(frozen=True)
class Flag:
    """Why an operand is looked at."""

    why: str
    #: first and last sample of the first stretch in which it was out of the baseline's band; None: it is not known
    out: tuple[int, int] | None = None


def flagged_by(found: Diagnosis) -> dict[Key, Flag]:
    """The operands that left the baseline's band before the loss diverged, by harm rank, and by which metric; all of them
    where it stays, and none where they are not to blame. A scale that surely went wrong counts whenever it did, since no
    loss brings that about, and so does an X or W that loses most of its values from some sample on to the end."""
    flagged: dict[Key, Flag] = {}
    if found.cause in (*NOT_FP8, *NO_RECIPE) or found.comparison is None:
        return flagged
    begun = (found.culprit.since or 0) if found.culprit else 0
    out = _stretches(found)
    for row in found.comparison.out_of_band.iter_rows(named=True):
        if found.divergence_step is not None and row["onset"] > max(found.divergence_step, begun):
            continue
        what = f"{row['metric']} {number(row['expected'])} -> {number(row['value'])} from step {row['onset']}"
        key = (row["layer"], row["role"])
        flagged.setdefault(key, Flag(what, out.get(key)))
    for each in found.findings:
        if each.rule != "operand" or each.confidence != "high" or each.cause == "nonfinite":
            continue
        wrong_by_itself = not each.may_follow_the_loss or each.severity >= 2
        if wrong_by_itself and each.layer and each.role:
            key = (each.layer, each.role)
            flagged.setdefault(key, Flag(f"{each.cause}: {each.evidence}", out.get(key)))
    ranks = harm_ranks(found)
    return {key: flagged[key] for key in sorted(flagged, key=lambda key: ranks.get(key, len(ranks)))}


def _stretches(found: Diagnosis) -> dict[Key, tuple[int, int]]:
    """First and last sample of each operand that was out of the band, by any metric."""
    assert found.comparison is not None
    steps = pl.Series(found.run.metrics.steps)
    rows = found.comparison.out_of_band.with_columns(at=steps.search_sorted(found.comparison.out_of_band["onset"]))
    ends = (pl.col("at") + pl.col("samples") - 1).max().clip(upper_bound=len(steps) - 1)
    each = rows.group_by("layer", "role").agg(pl.col("onset").min(), ends.alias("end"))
    return {(layer, role): (onset, steps[end]) for layer, role, onset, end in each.iter_rows()}
