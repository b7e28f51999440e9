"""Where did the first NaN or infinity come up: in an operand, the loss, the gradient norm, or what an optimizer keeps?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from ....core.keys import ROLES, SHOWN_AS, STATES
from ...loss.curve import LossCurve
from ...runs.metrics import IS_NONFINITE
from ...runs.run import Run
from .finding import Finding
from .gradient_norm import norms
from .producers import advise_on_nonfinite

#: order within a step: the forward pass, the loss, the backward pass, weight gradients, the gradient norm, the optimizer
_LOSS, _BACKWARD, _WEIGHT_GRADIENT, _NORM, _OPTIMIZER = 1, 2, 3, 4, 5


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
    kinds = _operand(run, baseline), _loss(run.loss, baseline), _gradients(run, baseline), _state(run, baseline)
    found = sorted(each for of_kind in kinds for each in of_kind)
    if not found:
        return []
    first, others = found[0], found[1:]
    told = f"the first NaN or infinity is in {first.what} at {run.unit} {first.step}"
    if others:
        told += "; then in " + ", in ".join(f"{each.what} at {each.step}" for each in others)
    operand = next((each for each in others if each.role in ROLES), None)
    sure = "high" if run.loss.lost_at is not None or first.layer is not None or _lasts(run) else "low"
    if first.layer is None and operand is not None:
        told += "; no operand was sampled in between"
        if _weights_are_finite(run, operand.step):
            told += ", but weights hold none: it comes up anew in each step"
            first, sure = replace(first, layer=operand.layer, role=operand.role), "medium"
    advice = advise_on_nonfinite(first.layer, first.role, first.what)
    return [Finding("nonfinite", "nonfinite", sure, told, advice, first.layer, first.role, first.step)]


def _weights_are_finite(run: Run, step: int) -> bool:
    weights = run.metrics.over(np.array([step])).with_role("weight").frame(["nan", "inf"])
    return len(weights) > 0 and weights.filter(IS_NONFINITE).is_empty()


def _operand(run: Run, baseline: Run | None) -> list[First]:
    rows = _lost_between(run)
    if baseline is not None:
        rows = rows.join(_lost_between(baseline).select("layer", "role").unique(), on=["layer", "role"], how="anti")
    if rows.is_empty():
        return []
    first = rows.filter(pl.col("step") == pl.col("step").min()).sort("nonfinite_order", nulls_last=True).row(0, named=True)
    name = f"{SHOWN_AS[first['role']]} of {first['layer']}"
    backward = _BACKWARD if first["role"] == "grad_output" else 0
    return [First(int(first["step"]), (backward, first["nonfinite_order"] or 0), name, first["layer"], first["role"])]


def _lost_between(run: Run) -> pl.DataFrame:
    """The first row of each operand that is not finite, and all rows of what lies between GEMMs that are not."""
    columns = ["step", "layer", "role", "nonfinite_order"]
    operands = run.metrics.gathered(
        ["nan", "inf", "nonfinite_order"],
        lambda rows: rows.filter(IS_NONFINITE).unique("tensor", keep="first", maintain_order=True),
    )
    activations = run.table("activations").filter((pl.col("scale_source") != "what-if") & IS_NONFINITE)
    activations = activations.filter(~pl.col("step").is_in(run.made_up_for.implode()))
    return pl.concat([run.metrics.named(operands).select(columns), activations.select(columns)])


def _state(run: Run, baseline: Run | None) -> list[First]:
    """Of what an optimizer steps by and keeps."""
    rows, usual = (_lost_states(each) for each in (run, baseline))
    rows = rows.join(usual.select("layer", "role").unique(), on=["layer", "role"], how="anti", maintain_order="left")
    if rows.is_empty():
        return []
    order = pl.col("role").replace_strict({role: i for i, role in enumerate(STATES)}, return_dtype=pl.Int64)
    first = rows.sort("step", order, maintain_order=True).row(0, named=True)
    place = _WEIGHT_GRADIENT if first["role"] == "weight_gradient" else _OPTIMIZER
    name = f"{SHOWN_AS[first['role']]} of {first['layer']}"
    return [First(int(first["step"]), (place, 0), name, first["layer"], first["role"])]


def _lost_states(run: Run | None) -> pl.DataFrame:
    """step, layer, role of those that are not finite."""
    if run is None:
        return pl.DataFrame(schema={"step": pl.Int64, "layer": pl.String, "role": pl.String})
    states = run.table("states").filter((pl.col("scale_source") != "what-if") & IS_NONFINITE)
    return states.filter(~pl.col("step").is_in(run.made_up_for.implode())).select("step", "layer", "role")


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
