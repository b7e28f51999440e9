"""Do weights shrink faster than weight decay lets them?

AdamW and SGD with decoupled decay multiply each weight by 1 - lr * decay a step. Gradients change single weights and hardly
the root mean square of all, so a fall of that by more than lr * 1 a step is another decay than any that is in use (0.01 to
0.3), or something else that writes weights.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from ...formatting import number
from ...runs.grid import Floats, Ints
from ...runs.run import Run
from .finding import Finding

#: decay that counts; and how many times the baseline's
_DECAY, _TIMES = 1.0, 4.0
#: samples in a row that must show it
_IN_A_ROW = 3
#: share of layers that must agree, and the least number of them
_MOST, _FEWEST = 0.75, 3
_ADVICE = "Look at the weight decay, at its parameter groups, and at what else writes the weights."


def weights(run: Run, baseline: Run | None) -> list[Finding]:
    """That the weights of most layers shrink, by how much, and since when."""
    steps, decays = _decays(run)
    limit = _DECAY
    if baseline is not None:
        _, usual = _decays(baseline)
        limit = max(limit, _TIMES * float(usual.max())) if len(usual) else limit
    if len(steps) < _IN_A_ROW:
        return []
    shrinks = np.lib.stride_tricks.sliding_window_view(decays > limit, _IN_A_ROW).all(-1)
    if not shrinks.any():
        return []
    at = int(np.argmax(shrinks))
    decay = float(np.median(decays[at:][decays[at:] > limit]))
    facts = (
        f"the weights of most layers shrink from {run.unit} {steps[at]} on as under a weight decay of {number(decay)} "
        "(their root mean square, by the learning rate)"
    )
    return [Finding("weights", "weight_decay", "medium", facts, _ADVICE, since=int(steps[at]), severity=2)]


def _decays(run: Run) -> tuple[Ints, Floats]:
    """Sampled steps but for the last one, and by what decay the weights of most layers shrank up to the next."""
    rows = run.metrics.filter(pl.col("role") == "weight", pl.col("relative_error") > 0, pl.col("mse") > 0)
    level = rows.with_columns(
        level=0.5 * pl.col("mse").log() - pl.col("relative_error").log()
    )  # log of the root mean square
    table = level.pivot(on="layer", index="step", values="level", aggregate_function="first").sort("step")
    levels, steps = table.drop("step").to_numpy().astype(np.float64), table["step"].to_numpy()
    if len(steps) < 2 or levels.shape[1] < _FEWEST:
        return steps[:0], np.zeros(0)
    rates = _rates(run, steps)
    by_layer = -np.diff(levels, axis=0)
    known = np.isfinite(by_layer).sum(axis=1) >= _FEWEST
    falls = np.zeros(len(by_layer))
    # Most layers shrink by at least as much as the one that three in four surpass.
    falls[known] = np.nanquantile(by_layer[known], 1 - _MOST, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        decays = np.nan_to_num(falls / rates, nan=-np.inf, posinf=-np.inf)
    return steps[:-1], decays


def _rates(run: Run, steps: Ints) -> Floats:
    """The sum of learning rates from each sampled step to the next; NaN where it is not known."""
    rows = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last").sort("step")
    if rows.is_empty():
        return np.full(len(steps) - 1, np.nan)
    every = np.arange(steps[0], steps[-1])
    rates = np.interp(every, rows["step"].to_numpy(), rows["lr"].to_numpy())
    sums: Floats = np.diff(np.concatenate([[0.0], np.cumsum(rates)])[steps - steps[0]])
    return sums
