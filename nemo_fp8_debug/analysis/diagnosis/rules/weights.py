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
from .levels import ROOT_MEAN_SQUARE, moves_of_levels

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
    steps, falls = _falls(run)
    if len(steps) < 2:
        return steps[:0], np.zeros(0)
    rates = _rates(run, steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        decays = np.nan_to_num(falls / rates, nan=-np.inf, posinf=-np.inf)
    return steps[:-1], decays


def _falls(run: Run) -> tuple[Ints, Floats]:
    """Sampled steps, and by how much the log of the root mean square of most weights falls from each to the next; 0 where
    few are known."""
    steps, falls = moves_of_levels(run.metrics.with_role("weight"), ROOT_MEAN_SQUARE, _fall_of_most)
    return steps, np.array(falls)


def _fall_of_most(moves: Floats) -> float:
    """Most layers shrink by at least as much as the one that three in four surpass."""
    enough = np.isfinite(moves).sum() >= _FEWEST
    return float(np.nanquantile(-moves, 1 - _MOST)) if enough else 0.0


def _rates(run: Run, steps: Ints) -> Floats:
    """The sum of learning rates from each sampled step to the next; NaN where it is not known."""
    rows = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last").sort("step")
    if rows.is_empty():
        return np.full(len(steps) - 1, np.nan)
    every = np.arange(steps[0], steps[-1])
    rates = np.interp(every, rows["step"].to_numpy(), rows["lr"].to_numpy())
    sums: Floats = np.diff(np.concatenate([[0.0], np.cumsum(rates)])[steps - steps[0]])
    return sums
