"""Where did the first NaN or infinity come up: in an operand, in the loss, or in the gradient norm?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from ....core.keys import SHOWN_AS
from ...loss.curve import LossCurve
from ...runs.run import Run
from .finding import Finding
from .gradient_norm import norms

#: order within a step: the forward pass, the loss, the backward pass, the gradient norm
_LOSS, _BACKWARD, _NORM = 1, 2, 3
_ADVICE = "Dump what comes up next: `triggers=['nonfinite']` samples the step after a loss or gradient norm of NaN."


@dataclass(frozen=True, order=True)
class First:
    """The first NaN or infinity of one kind of value."""

    step: int
    #: place within the step: pass, and order of execution
    place: tuple[int, int]
    what: str
    layer: str | None = None
    role: str | None = None


def nonfinite(run: Run, baseline: Run | None) -> list[Finding]:
    """The first NaN or infinity of a run, in order of execution, that the baseline does not have at the same place.

    What a skipped step had and later steps made good is not among them: `diagnose` leaves it out.
    """
    found = sorted([*_operand(run, baseline), *_loss(run.loss, baseline), *_gradients(run, baseline)])
    if not found:
        return []
    first, others = found[0], found[1:]
    told = f"the first NaN or infinity is in {first.what} at {run.unit} {first.step}"
    if others:
        told += "; then in " + ", in ".join(f"{each.what} at {each.step}" for each in others)
    operand = next((each for each in others if each.layer), None)
    sure = "high" if run.loss.lost_at is not None or first.layer is not None or _lasts(run) else "low"
    if first.layer is None and operand is not None:
        told += "; no operand was sampled in between"
        if _weights_are_finite(run, operand.step):
            told += ", but weights hold none: it comes up anew in each step"
            return [Finding("nonfinite", "nonfinite", "medium", told, _ADVICE, operand.layer, operand.role, first.step)]
    return [Finding("nonfinite", "nonfinite", sure, told, _ADVICE, first.layer, first.role, first.step)]


def _weights_are_finite(run: Run, step: int) -> bool:
    weights = run.metrics.filter((pl.col("step") == step) & (pl.col("role") == "weight"))
    return len(weights) > 0 and not (weights["nan"] + weights["inf"]).sum()


def _operand(run: Run, baseline: Run | None) -> list[First]:
    rows = run.metrics.filter(pl.col("nan") + pl.col("inf") > 0)
    if baseline is not None:
        usual = baseline.metrics.filter(pl.col("nan") + pl.col("inf") > 0).select("layer", "role").unique()
        rows = rows.join(usual, on=["layer", "role"], how="anti")
    if rows.is_empty():
        return []
    first = rows.filter(pl.col("step") == pl.col("step").min()).sort("nonfinite_order", nulls_last=True).row(0, named=True)
    name = f"{SHOWN_AS[first['role']]} of {first['layer']}"
    backward = _BACKWARD if first["role"] == "grad_output" else 0
    return [First(int(first["step"]), (backward, first["nonfinite_order"] or 0), name, first["layer"], first["role"])]


def _loss(loss: LossCurve, baseline: Run | None) -> list[First]:
    at = loss.steps[~np.isfinite(loss.losses)]
    return _not_in(baseline, [int(step) for step in at[:1]], "loss", (_LOSS, 0))


def _gradients(run: Run, baseline: Run | None) -> list[First]:
    lost = _lost_norms(run)
    return _not_in(baseline, [int(step) for step in lost[:1]], "gradient norm", (_NORM, 0))


def _not_in(baseline: Run | None, steps: list[int], what: str, place: tuple[int, int]) -> list[First]:
    """Of a kind of value that the baseline does not lose as well."""
    if baseline is not None:
        lost = ~np.isfinite(baseline.loss.losses) if what == "loss" else _lost_norms(baseline)
        if np.any(lost):
            return []
    return [First(step, place, f"the {what}") for step in steps]


def _lost_norms(run: Run) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Steps whose gradient norm is NaN or infinite, without those that were skipped while the optimizer stepped later."""
    rows = norms(run).filter(~pl.col("grad_norm").is_finite())
    return rows.filter(~pl.col("step").is_in(run.made_up_for.implode()))["step"].to_numpy()


def _lasts(run: Run) -> bool:
    """Whether the gradient norm is lost at the end too."""
    rows = norms(run)
    return bool(len(rows)) and not np.isfinite(rows["grad_norm"][-1])
