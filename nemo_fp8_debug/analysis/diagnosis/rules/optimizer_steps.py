"""Does the optimizer take its steps, and what does the gradient norm do?"""

from __future__ import annotations

import numpy as np
import polars as pl

from ...formatting import number
from ...loss.onset import stays
from ...loss.smoothing import running_median
from ...runs.grid import Floats
from ...runs.run import Run
from .finding import Finding

#: steps in a row at the end of a run, all skipped, that count; and the share of all steps
STOPPED, _SHARE = 5, 0.1
#: factor between gradient norms that counts
_LARGER = 4.0
#: bits that the gradient norm jumps by, at least, and scatters by behind it, at most, if it is multiplied by a factor
_JUMP, _SCATTER = 3.0, 0.75
#: values of the gradient norm on either side that a running median is taken over
_HALF = 2
_ADVICE = {
    "skipped": "Look at what makes the gradient norm NaN or infinite (`triggers=['nonfinite']`), and at the loss scale.",
    "factor": "Look at what multiplies the loss or divides gradients: loss scale, accumulation, data-parallel averaging.",
    "norm": "Look at what came before it: learning rate, data, the first tensor out of band.",
}


def optimizer_steps(run: Run, baseline: Run | None) -> list[Finding]:
    """Skipped steps and the gradient norm, against the baseline's where there is one."""
    return [*_skipped(run, baseline), *_norm(run, baseline)]


def stopped_at(run: Run) -> int | None:
    """First step from which the optimizer takes none any longer; None: it does, or is not known to skip."""
    skipped = _flags(run)
    taken = np.flatnonzero(~skipped["skipped"].to_numpy())
    first = int(taken[-1]) + 1 if len(taken) else 0
    return int(skipped["step"][first]) if len(skipped) - first >= STOPPED else None


def _flags(run: Run) -> pl.DataFrame:
    """step, skipped: of the steps that report it."""
    rows = run.steps.select("step", pl.col("skipped").fill_nan(None)).drop_nulls().unique("step", keep="last")
    return rows.with_columns(pl.col("skipped") != 0).sort("step")


def _skipped(run: Run, baseline: Run | None) -> list[Finding]:
    flags, unit = _flags(run), run.unit
    n, of = int(flags["skipped"].sum()), len(flags)
    if (since := stopped_at(run)) is not None:
        facts = f"the optimizer takes no step from {unit} {since} on ({n} of {of} steps are skipped)"
        return [Finding("optimizer steps", "skipped", "high", facts, _ADVICE["skipped"], since=since)]
    usual = 0.0
    if baseline is not None and len(theirs := _flags(baseline)):
        usual = int(theirs["skipped"].sum()) / len(theirs)
    if n >= STOPPED and n > (_SHARE + usual) * of:
        first = int(flags.filter("skipped")["step"][0])
        facts = f"{n} of {of} steps are skipped" + ("" if baseline is None else f", and {usual:.0%} of the baseline's")
        return [Finding("optimizer steps", "skipped", "low", facts, _ADVICE["skipped"], since=first)]
    return []


def norms(run: Run) -> pl.DataFrame:
    """step, grad_norm: where it is reported; NaN and infinite ones too."""
    rows = run.steps.select("step", "grad_norm").filter(pl.col("grad_norm").is_not_null())
    return rows.unique("step", keep="last").sort("step")


def _norm(run: Run, baseline: Run | None) -> list[Finding]:
    mine = norms(run).filter(pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0))
    if baseline is None:
        return []
    theirs = norms(baseline).filter(pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0))
    both = mine.join(theirs, on="step", suffix="_baseline").sort("step")
    if len(both) < 2 * _HALF + 1:
        return []
    apart = np.log2(both["grad_norm"].to_numpy() / both["grad_norm_baseline"].to_numpy())
    smooth = running_median(apart, _HALF)
    at = stays(smooth > np.log2(_LARGER), apart, _HALF)
    if at is None:
        return []
    since, times = int(both["step"][at]), 2 ** float(np.median(smooth[at:]))
    facts = f"the gradient norm is {number(times)} times the baseline's from {run.unit} {since} on (median)"
    if _at_once(apart, at):
        return [
            Finding(
                "gradient norm", "multiplier", "medium", f"{facts}, at once and steadily", _ADVICE["factor"], since=since
            )
        ]
    return [Finding("gradient norm", "unknown", "low", facts, _ADVICE["norm"], since=since)]


def _at_once(apart: Floats, at: int) -> bool:
    """Whether the gradient norm jumps from one value to the next, to a level that it keeps."""
    behind, before = apart[at:], apart[max(at - 4, 0) : at]
    if not len(before):
        return False
    scatter = 1.4826 * float(np.median(np.abs(behind - np.median(behind))))
    return bool(behind[0] - np.median(before) > _JUMP and scatter < _SCATTER)
