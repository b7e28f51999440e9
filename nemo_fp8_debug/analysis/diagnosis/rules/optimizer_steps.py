"""Does the optimizer take its steps?"""

from __future__ import annotations

import numpy as np
import polars as pl

from ...runs.run import Run
from .finding import Finding

#: steps in a row at the end of a run, all skipped, that count; and the share of all steps
STOPPED, _SHARE = 5, 0.1
_ADVICE = "Look at what makes the gradient norm NaN or infinite (`triggers=['nonfinite']`), and at the loss scale."


def optimizer_steps(run: Run, baseline: Run | None) -> list[Finding]:
    """Skipped steps, against the baseline's where there is one."""
    flags, unit = _flags(run), run.unit
    n, of = int(flags["skipped"].sum()), len(flags)
    if (since := stopped_at(run)) is not None:
        facts = f"the optimizer takes no step from {unit} {since} on ({n} of {of} steps are skipped)"
        return [Finding("optimizer steps", "skipped", "high", facts, _ADVICE, since=since)]
    usual = 0.0
    if baseline is not None and len(theirs := _flags(baseline)):
        usual = int(theirs["skipped"].sum()) / len(theirs)
    if n >= STOPPED and n > (_SHARE + usual) * of:
        first = int(flags.filter("skipped")["step"][0])
        facts = f"{n} of {of} steps are skipped" + ("" if baseline is None else f", and {usual:.0%} of the baseline's")
        return [Finding("optimizer steps", "skipped", "low", facts, _ADVICE, since=first)]
    return []


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
