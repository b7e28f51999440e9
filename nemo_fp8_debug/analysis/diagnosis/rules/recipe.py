"""Is each operand cast under the recipe that the baseline casts it under, and under one all along?"""

from __future__ import annotations

from typing import Any

import polars as pl

from ....core.keys import SHOWN_AS
from ...runs.run import Run
from .finding import Finding

_KEY = ["layer", "role"]
#: part of the operands that both runs have, beyond which another recipe is a setting of the run and not of an operand
_MOST = 0.5
_ADVICE = "Look at who set the recipe of these operands; run them under the baseline's to see whether it matters."


def recipes(run: Run, baseline: Run | None) -> list[Finding]:
    """Operands whose recipe changes in mid-run, or is not the baseline's."""
    known = run.metrics.filter(pl.col("recipe").is_not_null())
    return [*_changed(known, run.unit), *([] if baseline is None else _other(known, baseline))]


def _changed(rows: pl.DataFrame, unit: str) -> list[Finding]:
    """From one sample to the next."""
    ordered = rows.select(*_KEY, "step", "recipe").sort("step", maintain_order=True)
    moves = ordered.with_columns(before=pl.col("recipe").shift(1).over(_KEY))
    changed = moves.filter(pl.col("before") != pl.col("recipe"))
    if changed.is_empty():
        return []
    first = changed.row(0, named=True)
    what = f"is {first['recipe']} from {unit} {first['step']} on and was {first['before']}"
    return [_found(first, len(changed.select(_KEY).unique()), what)]


def _other(rows: pl.DataFrame, baseline: Run) -> list[Finding]:
    """Where the baseline's differs, both under recipes that do not change."""
    mine, theirs = (_constant(each) for each in (rows, baseline.metrics.filter(pl.col("recipe").is_not_null())))
    both = mine.join(theirs, on=_KEY, suffix="_baseline", maintain_order="left")
    differ = both.filter(pl.col("recipe") != pl.col("recipe_baseline"))
    if differ.is_empty() or len(differ) > _MOST * len(both):
        return []
    first = differ.row(0, named=True)
    what = f"is {first['recipe']} from the first sample on and {first['recipe_baseline']} in the baseline"
    return [_found(first, len(differ), what)]


def _constant(rows: pl.DataFrame) -> pl.DataFrame:
    """layer, role, recipe, step (the first) of operands with one recipe."""
    grouped = rows.group_by(_KEY, maintain_order=True)
    named = grouped.agg(pl.col("recipe").first(), pl.col("step").min(), n=pl.col("recipe").n_unique())
    return named.filter(pl.col("n") == 1)


def _found(first: dict[str, Any], operands: int, what: str) -> Finding:
    layer, role = str(first["layer"]), str(first["role"])
    more = f"; so it is of {operands - 1} other operands" if operands > 1 else ""
    facts = f"the recipe of {SHOWN_AS[role]} of {layer} {what}{more}"
    return Finding("recipe", "changed_recipe", "high", facts, _ADVICE, layer, role, int(first["step"]))
