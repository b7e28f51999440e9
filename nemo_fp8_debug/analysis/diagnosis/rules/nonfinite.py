"""A rule about the first NaN or infinity in operands, the loss, the gradient norm, or the tables of features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from ....core.keys import ROLES, SHOWN_AS
from ....core.table import load_feature_modules
from ...runs.metrics import IS_NONFINITE
from ...runs.run import Run
from ..facts import DiagnosedRecords, Facts, define_fact, subtract_baseline_tensors
from ..finding import Finding, advise_on_nonfinite
from ..rule import register_rule

#: order of passes in a step: the forward pass, the loss, the backward pass, weight gradients, the gradient norm, the
#: optimizer
FORWARD, LOSS, BACKWARD, WEIGHT_GRADIENT, NORM, OPTIMIZER = range(6)


@dataclass(frozen=True, order=True)
class FirstNonfinite:
    """The first NaN or infinity of one kind of value."""

    step: int
    #: index of the pass in the step, and order of execution in the pass
    place: tuple[int, int]
    what: str
    layer: str | None = None
    role: str | None = None


@dataclass(frozen=True)
class NonfiniteValues:
    """The first NaN or infinity of each kind of value, in order."""

    first: tuple[FirstNonfinite, ...]
    #: whether all W are finite in the first sample in which an operand has NaN or infinity
    weights_are_finite: bool


@define_fact
def nonfinite_values(records: DiagnosedRecords) -> NonfiniteValues:
    """Return the first NaN or infinity of each kind of value, without those that also occur in the baseline."""
    run, baseline = records.run, records.baseline
    found = [*_of_operands(run, baseline), *_of_loss(run, baseline), *_of_norms(run, baseline)]
    for module in load_feature_modules("rule"):
        for rows in (module.find_nonfinite(run, baseline),) if hasattr(module, "find_nonfinite") else ():
            found += rows
    found = list({each.what: each for each in sorted(found, reverse=True)}.values())[::-1]
    found.sort()
    operand = next((each for each in found if each.role in ROLES), None)
    return NonfiniteValues(tuple(found), operand is not None and _weights_are_finite(run, operand.step))


@register_rule("nonfinite", ("nonfinite",), (nonfinite_values,), event="nonfinite", needs_no_baseline=True)
def find_first_nonfinite(facts: Facts) -> Iterator[Finding]:
    """Name the place of the first NaN or infinity in order of execution.

    Steps that the loss scaler skipped do not count.

    Example: a fused kernel overflows, so dY of layers.1.mlp has the first NaN at step 40, and the loss is NaN at step 41.
    """
    values = nonfinite_values(facts)
    if not values.first:
        return
    first, others = values.first[0], values.first[1:]
    evidence = f"the first NaN or infinity is in {first.what} at {facts.unit} {first.step}"
    if others:
        evidence += "; then in " + ", in ".join(f"{each.what} at {each.step}" for each in others)
    loss = facts.loss.run
    lost = loss.steps[~np.isfinite(loss.losses)]
    if len(lost) and loss.all_nonfinite_from_step is None and len(after := loss.steps[loss.steps > lost[-1]]):
        evidence += f"; the loss is a number again from {after[0]} on"
    operand = next((each for each in others if each.role in ROLES), None)
    if first.layer is None and operand is not None:
        evidence += "; no operand was sampled in between"
        if values.weights_are_finite:
            evidence += ", but all W are finite, so it comes up anew in each step"
            first = replace(first, layer=operand.layer, role=operand.role)
    advice = advise_on_nonfinite(first.layer, first.role, first.what, first.step in facts.steps)
    yield Finding("nonfinite", "nonfinite", "clear", evidence, first.layer, first.role, first.step, advice)


def _weights_are_finite(run: Run, step: int) -> bool:
    weights = run.metrics.select_steps(np.array([step])).select_roles("weight").read_all_rows(["nan", "inf"])
    return len(weights) > 0 and weights.filter(IS_NONFINITE).is_empty()


def _of_operands(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    return find_first_nonfinite_row(subtract_baseline_tensors(_lost_operands, run, baseline))


def find_first_nonfinite_row(rows: pl.DataFrame) -> list[FirstNonfinite]:
    """Return a list with the first row in order of execution, empty without rows. Rows have step, layer, role,
    nonfinite_order.
    """
    if rows.is_empty():
        return []
    first = rows.filter(pl.col("step") == pl.col("step").min()).sort("nonfinite_order", nulls_last=True).row(0, named=True)
    place = (BACKWARD if first["role"] == "grad_output" else FORWARD), first["nonfinite_order"] or 0
    name = f"{SHOWN_AS[first['role']]} of {first['layer']}"
    return [FirstNonfinite(int(first["step"]), place, name, first["layer"], first["role"])]


def _lost_operands(run: Run) -> pl.DataFrame:
    """For each operand, return the first row with NaN or infinity."""
    operands = run.metrics.reduce_rows(
        ["nan", "inf", "nonfinite_order"],
        lambda rows: rows.filter(IS_NONFINITE).unique("tensor", keep="first", maintain_order=True),
    )
    return run.metrics.add_tensor_names(operands).select("step", "layer", "role", "nonfinite_order")


def _of_loss(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    if baseline is not None and not np.isfinite(baseline.loss.losses).all():
        return []
    lost = run.loss.steps[~np.isfinite(run.loss.losses)]
    return [FirstNonfinite(int(step), (LOSS, 0), "the loss") for step in lost[:1]]


def _of_norms(run: Run, baseline: Run | None) -> list[FirstNonfinite]:
    if baseline is not None and len(_lost_norms(baseline)):
        return []
    return [FirstNonfinite(int(step), (NORM, 0), "the gradient norm") for step in _lost_norms(run)[:1]]


def _norms(run: Run) -> pl.DataFrame:
    rows = run.steps.select("step", "grad_norm").filter(pl.col("grad_norm").is_not_null())
    return rows.unique("step", keep="last").sort("step")


def _lost_norms(run: Run) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = _norms(run).filter(~pl.col("grad_norm").is_finite())
    return rows.filter(~pl.col("step").is_in(run.loss_scale_skips.implode()))["step"].to_numpy()
