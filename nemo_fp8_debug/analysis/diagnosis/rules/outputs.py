"""Does the error of an operand reach what GEMMs put out? An operand can lose most of its values and hurt nothing."""

from __future__ import annotations

import polars as pl

from ...formatting import number
from .finding import Finding

#: what an operand's part of the error of an output grows by when it reaches it
_GROWS = 1.5


def reach(found: Finding, run: pl.DataFrame, baseline: pl.DataFrame | None = None) -> Finding | None:
    """What an operand adds to the errors of outputs since it left; None where outputs were not measured.

    Args:
        found: about an operand.
        run: `outputs` table.
        baseline: likewise; without it the samples before the onset tell what is usual.
    """
    part = f"error_of_{found.role}"
    if part not in run.columns:  # outputs of attention are not measured
        return None
    of_layer = (pl.col("layer") == found.layer) & pl.col(part).is_not_null()
    after = run.filter(of_layer & (pl.col("step") >= found.since))
    usual = baseline.filter(of_layer) if baseline is not None else run.filter(of_layer & (pl.col("step") < found.since))
    told, grown = [], False
    for product in after["product"].unique(maintain_order=True):
        now, before = (rows.filter(product=product)[part].median() for rows in (after, usual))
        if isinstance(now, float) and isinstance(before, float):
            told.append(f"{number(before)} -> {number(now)} of the output of {product}")
            grown = grown or now > _GROWS * before
    if not told:
        return None
    what = "reaches" if grown else "does not reach"
    facts = f"its error {what} what the GEMMs put out: {', '.join(told)}"
    return Finding("outputs", found.cause if grown else "none", "high", facts, "", found.layer, found.role, found.since)
