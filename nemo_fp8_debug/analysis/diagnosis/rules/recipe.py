"""Is each operand cast under the recipe that the baseline casts it under, and under one all along?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from ....core.keys import SHOWN_AS
from ...runs.grid import stretches
from ...runs.metrics import Metrics
from ...runs.run import Run
from .finding import Finding

_KEY = ["layer", "role"]
#: part of the operands that both runs have, beyond which another recipe is a setting of the run and not of an operand
_MOST = 0.5
_ADVICE = "Look at who set the recipe of these operands; run them under the baseline's to see whether it matters."


def recipes(run: Run, baseline: Run | None) -> list[Finding]:
    """Operands whose recipe changes in mid-run, or is not the baseline's."""
    return [*_changed(run), *([] if baseline is None else _other(run, baseline))]


def _changed(run: Run) -> list[Finding]:
    """From one sample to the next."""
    names = [name for name in run.metrics.unique("recipe") if name is not None]
    last, changed, first = np.full(len(run.metrics.tensors), -1), set[int](), None
    for rows in run.metrics.scan(["recipe"]) if len(names) > 1 else ():
        known = rows.drop_nulls("recipe")
        codes = known["recipe"].replace_strict(names, range(len(names)), return_dtype=pl.Int64).to_numpy()
        tensors = known["tensor"].to_numpy()
        for step, here in stretches(known["step"].to_numpy()):
            these, now = tensors[here], codes[here]
            moved = np.flatnonzero((last[these] >= 0) & (last[these] != now))
            if first is None and len(moved):
                first = step, *(int(of[moved[0]]) for of in (these, now, last[these]))
            changed.update(these[moved].tolist())
            last[these] = now
    if first is None:
        return []
    step, tensor, code, before = first
    about = run.metrics.tensors.row(tensor, named=True) | {"step": step}
    return [_found(about, len(changed), f"is {names[code]} from {run.unit} {step} on and was {names[before]}")]


def _other(run: Run, baseline: Run) -> list[Finding]:
    """Where the baseline's differs, both under recipes that do not change."""
    mine, theirs = (_constant(each.metrics) for each in (run, baseline))
    both = mine.join(theirs, on=_KEY, suffix="_baseline", maintain_order="left")
    differ = both.filter(pl.col("recipe") != pl.col("recipe_baseline"))
    if differ.is_empty() or len(differ) > _MOST * len(both):
        return []
    first = differ.row(0, named=True)
    rows = run.metrics.within(differ.head(1)).frame(["recipe"]).drop_nulls("recipe")
    first = first | {"step": rows["step"].min()}
    what = f"is {first['recipe']} from the first sample on and {first['recipe_baseline']} in the baseline"
    return [_found(first, len(differ), what)]


def _constant(metrics: Metrics) -> pl.DataFrame:
    """layer, role, recipe of operands with one recipe."""

    counts = {name: of_each for name, of_each in metrics.counts("recipe").items() if name is not None}
    has = (
        np.stack([of_each > 0 for of_each in counts.values()]) if counts else np.zeros((1, len(metrics.tensors)), dtype=bool)
    )
    recipes = pl.Series(list(counts) or [None], dtype=pl.String).gather(has.argmax(axis=0))
    return metrics.tensors.with_columns(recipe=recipes).filter(pl.Series(has.sum(axis=0) == 1))


def _found(first: dict[str, Any], operands: int, what: str) -> Finding:
    layer, role = str(first["layer"]), str(first["role"])
    more = f"; so it is of {operands - 1} other operands" if operands > 1 else ""
    facts = f"the recipe of {SHOWN_AS[role]} of {layer} {what}{more}"
    return Finding("recipe", "changed_recipe", "high", facts, _ADVICE, layer, role, int(first["step"]))
