"""Is the learning rate what the baseline's is, or did it rise after its warm-up?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from ...formatting import number
from ...runs.run import Run
from .finding import Finding

#: factor between two learning rates that counts, and that is large
DIFFERS, LARGE = 1.05, 1.5
#: factor by which a learning rate may rise, beyond which it harmed all runs of the benchmark
HARMS = 8.0
#: part of a learning rate by which another may differ and be the same, computed otherwise
ROUNDING = 1e-5
#: learning rates in a row that make a difference
_IN_A_ROW = 2
#: values without a rise that end a warm-up
_LEVEL = 3
_ADVICE = "Look at the schedule, at what was resumed, and at who sets the learning rate."


def learning_rate(run: Run, baseline: Run | None) -> list[Finding]:
    """That it departs from the baseline's, or alone that it rises above all that it was after the warm-up."""
    mine = _known(run.steps)
    if baseline is None:
        return _alone(mine, run.unit)
    both = mine.join(_known(baseline.steps), on="step", suffix="_baseline").sort("step")
    ratios = (both["lr"] / both["lr_baseline"]).to_numpy()
    at = _first(np.abs(np.log2(ratios)) > np.log2(DIFFERS))
    if at is None:
        return []
    farthest = at + int(np.argmax(np.abs(np.log2(ratios[at:]))))
    # Reported at some steps only, it may have departed at any behind the last that was the same.
    since, last = int(both["step"][at - 1]) + 1 if at else int(both["step"][0]), int(both["step"][farthest])
    times = float(ratios[farthest])
    what = f"{_factor(times)} times" if times > 1 else f"1/{_factor(1 / times)} of"
    before = f"after {run.unit} {both['step'][at - 1]}" if at else "from the start"
    facts = (
        f"it departs from the baseline's {before}, and is {what} it at {last}: "
        f"{number(both['lr'][farthest])} instead of {number(both['lr_baseline'][farthest])}"
    )
    confidence = "high" if times > LARGE else "low"
    severity = 2 if times > HARMS else 0
    return [Finding("learning rate", "learning_rate", confidence, facts, _ADVICE, since=since, severity=severity)]


def _factor(times: float) -> str:
    """Three digits, without an exponent.

    Example:
        >>> _factor(4.0), _factor(2895.3)
        ('4', '2,895')
    """
    return f"{times:,.0f}" if times >= 100 else f"{times:.3g}"


def _alone(mine: pl.DataFrame, unit: str) -> list[Finding]:
    rates, steps = mine["lr"].to_numpy(), mine["step"].to_numpy()
    for i in range(_LEVEL, len(rates)):
        before = rates[:i]
        level = not (np.diff(rates[i - _LEVEL : i]) > 0).any()
        highest = float(before.max())
        if level and rates[i:].min() >= highest and rates[i:].max() > LARGE * highest:
            at = i + int(np.argmax(rates[i:] > DIFFERS * highest))
            most = number(float(rates[i:].max()))
            facts = f"it rises from {number(highest)} at {unit} {steps[at - 1]} to {most} after its warm-up"
            since, severity = int(steps[at - 1]) + 1, 2 if rates[i:].max() > HARMS * highest else 0
            return [Finding("learning rate", "learning_rate", "medium", facts, _ADVICE, since=since, severity=severity)]
    return []


def departure(run: pl.DataFrame, baseline: pl.DataFrame) -> dict[str, Any] | None:
    """Where two learning rates first differ by more than rounding: step, run, baseline (what each is there) and before (the
    last step before it that both know); None: nowhere, or no step is known to both.

    Args:
        run: a table with step and lr.
        baseline: likewise.

    Example:
        >>> departure(pl.DataFrame({"step": [0, 9], "lr": [1.0, 4.0]}), pl.DataFrame({"step": [0, 9], "lr": [1.0, 1.0]}))
        {'step': 9, 'run': 4.0, 'baseline': 1.0, 'before': 0}
    """
    both = _known(run).join(_known(baseline), on="step", suffix="_baseline").sort("step")
    apart = (both["lr"] / both["lr_baseline"] - 1).abs() > ROUNDING
    if not apart.any():
        return None
    at = int(apart.arg_max() or 0)
    step, mine, theirs = both.row(at)
    return {"step": step, "run": mine, "baseline": theirs, "before": both["step"][at - 1] if at else None}


def _known(steps: pl.DataFrame) -> pl.DataFrame:
    """step, lr: where it is a positive number."""
    rows = steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last")
    return rows.filter(pl.col("lr").is_finite() & (pl.col("lr") > 0)).sort("step")


def _first(differs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Where the first few in a row begin, or, if there are not so many, all."""
    needed = min(_IN_A_ROW, len(differs))
    if not needed:
        return None
    rows = np.lib.stride_tricks.sliding_window_view(differs, needed).all(-1)
    return int(np.argmax(rows)) if rows.any() else None
