"""How far a run's loss lies above a baseline's, how sure that is, and the smallest gap that could have been seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from .alignment import Aligned, Floats, align
from .curve import LossCurve
from .smoothing import standard_error

#: part of the steps in common, from the end, whose mean is compared, and the least number of losses in it
PART, FEWEST = 0.2, 20
#: losses below which nothing is said
TOO_FEW = 10
#: of the interval that is printed, and the chance with which a gap of the smallest visible size is seen
CONFIDENCE, POWER = 0.95, 0.8
CHECK_DATA = "Before you trust this loss, check for repeated data, leaked labels or a missing mask."


@dataclass(frozen=True)
class Gap:
    """The mean loss of a run over the last part of its steps, above that of a baseline, in percent of the latter or of its
    range; negative: the run's is lower."""

    percent: float
    #: standard error of `percent`, and its degrees of freedom
    error: float
    freedom: int
    #: first and last step, and the number of losses
    first: int
    last: int
    n: int
    #: whether both runs saw the same batches in the same order, and the correlation of their losses that shows it
    paired: bool
    correlation: float
    #: losses of either run that are NaN or infinite and were left out
    left_out: int = 0
    #: whether percents are of the range of the baseline's losses, which cross zero or come very near it
    of_range: bool = False

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Percent, two-sided."""
        reach = self.error * float(stdtrit(self.freedom, 0.5 + confidence / 2)) if self.error else 0.0
        return self.percent - reach, self.percent + reach

    @property
    def visible(self) -> float:
        """The smallest gap, in percent, that would have been seen with a chance of 80%: its interval would not hold 0."""
        reach = stdtrit(self.freedom, 0.5 + CONFIDENCE / 2) + stdtrit(self.freedom, POWER)
        return self.error * float(reach) if self.error else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values: percent, low, high (of the 95% interval), visible, first, last, n, paired, left_out, of_range."""
        low, high = self.interval()
        named = {name: getattr(self, name) for name in ("first", "last", "n", "paired", "left_out", "of_range")}
        return {"percent": self.percent, "low": low, "high": high, "visible": self.visible} | named

    @property
    def infinite(self) -> bool:
        """Whether the run has no loss left to take a mean of."""
        return not np.isfinite(self.percent)


def gap(run: LossCurve, baseline: LossCurve, part: float = PART, after: int | None = None) -> Gap | None:
    """The gap of a run to a baseline.

    Losses are compared where both have them. The standard error is that of the mean of run - ratio * baseline, by the delta
    method, and it takes into account that losses depend on those before. It holds for runs of the same batches, whose
    noise cancels, and of others, whose noise adds up.

    Args:
        part: of the steps that both cover, from the end.
        after: step; only later ones are compared, instead of `part`.

    Returns:
        None if the two share fewer than 10 losses, or the baseline's are all zero.

    Example:
        >>> import numpy as np, polars as pl
        >>> noise = np.random.default_rng(0).normal(0, 0.02, 500)
        >>> losses = [LossCurve.of(pl.DataFrame({"step": range(500), "loss": 2 * (1 + noise) * f})) for f in (1.01, 1.0)]
        >>> found = gap(*losses)
        >>> round(found.percent, 3), found.n, found.paired
        (1.0, 100, True)
    """
    return gap_of(align(run, baseline), part, after)


def gap_of(aligned: Aligned, part: float = PART, after: int | None = None, fewest: int = FEWEST) -> Gap | None:
    """Of losses that are aligned already; see `gap`."""
    aligned = aligned.last(part, after, fewest)
    known = np.isfinite(aligned.baseline)
    finite = known & np.isfinite(aligned.run)
    if known.sum() < TOO_FEW or not (aligned.range or float(np.mean(aligned.baseline[known]))):
        return None
    ends = int(aligned.steps[0]), int(aligned.steps[-1])
    measured = np.inf, 0.0, 1
    if not _gone(aligned.run) and finite.sum() >= TOO_FEW:
        measured = relative(aligned.run[finite], aligned.baseline[finite], aligned.range)
    left_out, of_range = int((~finite).sum()), aligned.range is not None
    return Gap(*measured, *ends, int(finite.sum()), aligned.paired, aligned.correlation, left_out, of_range)


def relative(run: Floats, baseline: Floats, whole: float | None = None) -> tuple[float, float, int]:
    """Return the gap in percent, its standard error and degrees of freedom, of losses at the same places.

    Args:
        whole: what 100% are; None: the baseline's level, of either sign.
    """
    if whole is not None:
        error, freedom = standard_error(run - baseline)
        return 100 * float(run.mean() - baseline.mean()) / whole, 100 * error / whole, freedom
    level = float(baseline.mean())
    ratio = float(run.mean()) / level
    error, freedom = standard_error(run - ratio * baseline)
    return 100 * (ratio - 1 if level > 0 else 1 - ratio), 100 * error / abs(level), freedom


def _gone(losses: Floats) -> bool:
    """Whether the losses end in NaN or infinity, more than one."""
    return bool(len(losses) > 1 and not np.isfinite(losses[-2:]).any())
