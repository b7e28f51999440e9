"""A rule about operands with a recipe that changes during the run, or that differs from the recipe in the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from ....core.keys import SHOWN_AS, Key
from ....core.scale_sources import select_quantized_sources
from ... import thresholds
from ...runs.grid import split_into_constant_stretches
from ...runs.metrics import MetricsTable
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule

_KEY = ["layer", "role"]


class RecipeChange(NamedTuple):
    """The first operand with a changed or different recipe, and the keys of all such operands."""

    layer: str
    role: str
    step: int
    now: str
    before: str
    #: True for a change during the run, False for a difference from the baseline
    in_the_run: bool
    #: layer and role of all operands with a changed or different recipe
    keys: tuple[Key, ...]
    #: layer and role of the operands with these two recipes; empty if facts were stored before this field existed
    alike: tuple[Key, ...] = ()


@define_fact
def recipe_changes(records: DiagnosedRecords) -> list[RecipeChange]:
    """Return the changes of recipes in the run, and the differences from the baseline.

    Leave out operands whose recipe a plan chose, because a plan is a change that the user wants.
    """
    run, baseline = records.run.metrics, None if records.baseline is None else records.baseline.metrics
    planned = records.run.planned
    if planned:
        run = run.select_tensors(run.tensors.filter(pl.Series([key not in planned for key in run.tensors.rows()])))
    found = _changed(run.select_tensors(_list_quantized(run))), None if baseline is None else _differs(run, baseline)
    return [each for each in found if each is not None]


@register_rule("recipe", ("changed_recipe",), (recipe_changes,), event="recipe")
def find_recipe_changes(facts: Facts) -> Iterator[Finding]:
    """Name operands if their recipe changes during the run, or differs from the recipe in the baseline.

    Example: dY of layers.0.fc1 is E4M3 from step 80 on, and was E5M2 before.
    """
    for each in recipe_changes(facts):
        evidence = f"the recipe changed from {each.before} to {each.now}"
        if not each.in_the_run:
            evidence = f"the recipe is {each.now}, and {each.before} in the baseline"
        others = [f"{SHOWN_AS[role]} of {layer}" for layer, role in each.alike if (layer, role) != (each.layer, each.role)]
        yield Finding("recipe", "changed_recipe", "clear", evidence, each.layer, each.role, each.step, others=others)


def _list_quantized(metrics: MetricsTable) -> pl.DataFrame:
    """Return layer and role of operands that may be quantized in some sample. For other operands, we assume a recipe."""
    counts, none = metrics.count_rows_by_value("scale_source"), np.zeros(len(metrics.tensors), dtype=np.int64)
    return metrics.tensors.filter(pl.Series(sum((counts[source] for source in select_quantized_sources(counts)), none) > 0))


def _changed(metrics: MetricsTable) -> RecipeChange | None:
    names = [name for name in metrics.list_distinct_values("recipe") if name is not None]
    last, changed, first = np.full(len(metrics.tensors), -1), dict[int, tuple[int, int]](), None
    for rows in metrics.read_rows_in_batches(["recipe"]) if len(names) > 1 else ():
        known = rows.drop_nulls("recipe")
        codes = known["recipe"].replace_strict(names, range(len(names)), return_dtype=pl.Int64).to_numpy()
        tensors = known["tensor"].to_numpy()
        for step, here in split_into_constant_stretches(known["step"].to_numpy()):
            these, now = tensors[here], codes[here]
            moved = np.flatnonzero((last[these] >= 0) & (last[these] != now))
            if first is None and len(moved):
                first = step, *(int(each[moved[0]]) for each in (these, now, last[these]))
            moves = zip(these[moved].tolist(), now[moved].tolist(), last[these[moved]].tolist(), strict=True)
            changed |= {tensor: (code, before) for tensor, code, before in moves if tensor not in changed}
            last[these] = now
    if first is None:
        return None
    step, tensor, code, before = first
    layer, role = metrics.tensors.row(tensor)
    keys = tuple(metrics.tensors.row(each) for each in sorted(changed))
    alike = tuple(metrics.tensors.row(each) for each in sorted(changed) if changed[each] == (code, before))
    return RecipeChange(layer, role, step, names[code], names[before], True, keys, alike)


def _differs(run: MetricsTable, baseline: MetricsTable) -> RecipeChange | None:
    """Return the quantized operands with a constant recipe that differs from the baseline.

    Return None if no operands or most operands differ.
    """
    mine, theirs = (_constant(each) for each in (run, baseline))
    quantized = pl.concat([_list_quantized(each).select(_KEY) for each in (run, baseline)])
    both = mine.join(theirs, on=_KEY, suffix="_baseline", maintain_order="left")
    both = both.join(quantized, on=_KEY, how="semi", maintain_order="left")
    differ = both.filter(pl.col("recipe") != pl.col("recipe_baseline"))
    if differ.is_empty() or len(differ) > thresholds.MOST * len(both):
        return None
    first = differ.row(0, named=True)
    step = run.select_tensors_by_key(differ.head(1)).read_all_rows(["recipe"]).drop_nulls("recipe")["step"].min()
    assert isinstance(step, int)
    layer, role, now, before = (first[name] for name in (*_KEY, "recipe", "recipe_baseline"))
    alike = differ.filter((pl.col("recipe") == now) & (pl.col("recipe_baseline") == before))
    return RecipeChange(layer, role, step, now, before, False, *(tuple(t.select(_KEY).rows()) for t in (differ, alike)))


def _constant(metrics: MetricsTable) -> pl.DataFrame:
    """Return layer, role and recipe of operands with a constant recipe."""
    counts = {name: of_each for name, of_each in metrics.count_rows_by_value("recipe").items() if name is not None}
    none = np.zeros((1, len(metrics.tensors)), dtype=bool)
    has = np.stack([of_each > 0 for of_each in counts.values()]) if counts else none
    recipes = pl.Series(list(counts) or [None], dtype=pl.String).gather(has.argmax(axis=0))
    return metrics.tensors.with_columns(recipe=recipes).filter(pl.Series(has.sum(axis=0) == 1))
