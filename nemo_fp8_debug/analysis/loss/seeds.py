"""Several runs that went well and differ in their seed: their mean loss, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.special import stdtrit

from .alignment import align
from .curve import LossCurve
from .gap import PART, TOO_FEW


@dataclass(frozen=True)
class Seeds:
    """How far runs end apart that differ in nothing but their seed and batches."""

    n: int
    #: standard deviation of the mean losses over the last part, in percent of their mean
    spread: float

    @property
    def nearer(self) -> float:
        """How far another run lies from the mean of all, in units of how far two of them lie apart."""
        return float(np.sqrt((1 + 1 / self.n) / 2))

    def reach(self, confidence: float) -> float:
        """Percent above the mean of all that another run of the same recipe ends at the most, one-sided; infinite of one."""
        if self.n < 2:
            return np.inf
        return self.spread * float(np.sqrt(1 + 1 / self.n) * stdtrit(self.n - 1, confidence))

    def to_json(self) -> dict[str, float]:
        """Plain values: n, spread, and the percent above the mean that 1 in 20 other runs would end at or beyond."""
        return {"n": self.n, "spread": self.spread, "one_in_20": self.reach(0.95)}


def of_other_batches(curves: Sequence[LossCurve]) -> list[LossCurve]:
    """Without those that saw the batches of one before: they end near it, whatever seeds differ by.

    Example:
        >>> noise = np.random.default_rng(0).normal(0, 0.02, (2, 200))
        >>> first, other = (LossCurve.of(pl.DataFrame({"step": range(200), "loss": 2 + each})) for each in noise)
        >>> len(of_other_batches([first, other, first]))
        2
    """
    found: list[LossCurve] = []
    for curve in curves:
        if not any(align(curve, each).paired for each in found):
            found.append(curve)
    return found


def mean_of(curves: Sequence[LossCurve]) -> LossCurve:
    """The mean of one or several losses at those steps of the first that all cover.

    Where another one has no loss at a step, it is taken in between.

    Example:
        >>> first, second = (LossCurve.of(pl.DataFrame({"step": [0, 1, 2, 3], "loss": [x] * 4})) for x in (1.0, 3.0))
        >>> mean_of([first, second]).losses.tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    start, stop = max(int(each.steps[0]) for each in curves), min(int(each.steps[-1]) for each in curves)
    steps = curves[0].steps[(curves[0].steps >= start) & (curves[0].steps <= stop)]
    with np.errstate(invalid="ignore"):
        mean = np.mean([np.interp(steps, each.steps, each.losses) for each in curves], axis=0)
    return LossCurve.of(pl.DataFrame({"step": steps, "loss": mean}))


def seeds_of(curves: Sequence[LossCurve], mean: LossCurve) -> Seeds:
    """How far several losses lie apart in the end.

    Args:
        mean: of them all.

    Example:
        >>> curves = [LossCurve.of(pl.DataFrame({"step": range(50), "loss": [x] * 50})) for x in (1.98, 2.02)]
        >>> round(seeds_of(curves, mean_of(curves)).spread, 2)
        1.41
    """
    last = mean.steps[-max(round(PART * len(mean.steps)), min(TOO_FEW, len(mean.steps))) :]
    ends = [float(np.interp(last, each.steps, each.losses).mean()) for each in curves]
    level = float(np.mean(ends))
    spread = 100 * float(np.std(ends, ddof=1)) / level if np.isfinite(ends).all() and level > 0 else np.inf
    return Seeds(len(curves), spread)
