"""Compare the losses of two runs: whether both runs saw the same batches, how large the gap is at the end, and at which step
the gap began.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from .. import thresholds
from .curve import (
    LossCurve,
    PercentBase,
    compute_autocorrelation_factor,
    compute_running_median,
    estimate_standard_error,
    find_lasting_start,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: fraction of the shorter run's steps that both runs must share; otherwise, we compare means over intervals of steps
_SHARED = 0.9
#: both runs saw the same batches if the correlation of their step-to-step changes exceeds both this value and this many
#: standard errors
_ALIKE, _ERRORS = 0.1, 4.0


@dataclass(frozen=True)
class AlignedLosses:
    """Losses of a run and of a baseline at the same steps, or their means over the same intervals of steps. We call each
    such step or interval a place. Non-finite losses are stored as infinity.
    """

    #: steps, or the first step of each interval
    steps: Ints
    run: Floats
    baseline: Floats
    #: number of steps from one place to the next
    spacing: int
    #: correlation of the two losses' changes from place to place; NaN if there are too few changes
    correlation: float
    #: the value that counts as 100% of a gap; None: the baseline's level
    scale: PercentBase | None = None

    @property
    def has_shared_noise(self) -> bool:
        """Return True if the noise of the two losses is correlated, as in runs that see the same batches in the same
        order.
        """
        least = max(_ALIKE, _ERRORS / max(len(self.steps), 1) ** 0.5)
        return bool(self.correlation > least)

    def select_last_part(self, part: float, after: int | None, least: int) -> AlignedLosses:
        """Return the last part of the places, with at least `least` places if there are so many. If `after` is not None,
        return all places after this step.
        """
        if after is None:
            n = max(round(part * len(self.steps)), min(least, len(self.steps)))
            kept = slice(len(self.steps) - n, None)
        else:
            kept = slice(int(np.searchsorted(self.steps, after, side="right")), None)
        return replace(self, steps=self.steps[kept], run=self.run[kept], baseline=self.baseline[kept])


def align_losses(run: LossCurve, baseline: LossCurve) -> AlignedLosses:
    """Align two losses at their common steps. If these are too few, use means over intervals of steps that both losses
    cover.

    Example:
        >>> import polars as pl
        >>> coarse = LossCurve.from_steps_table(pl.DataFrame({"step": [0, 10, 20, 30], "loss": [4.0, 3.0, 2.0, 1.0]}))
        >>> fine = LossCurve.from_steps_table(pl.DataFrame({"step": range(40), "loss": [2.0] * 40}))
        >>> align_losses(coarse, fine).steps.tolist()
        [0, 10, 20, 30]
    """
    shared, mine, theirs = np.intersect1d(run.steps, baseline.steps, return_indices=True)
    first = max(run.steps[0], baseline.steps[0]) if len(run.steps) and len(baseline.steps) else 0
    last = min(run.steps[-1], baseline.steps[-1]) if len(run.steps) and len(baseline.steps) else -1
    fewest = min(int(((c.steps >= first) & (c.steps <= last)).sum()) for c in (run, baseline))
    spacing = max(_spacing(run.steps), _spacing(baseline.steps))
    if len(shared) >= _SHARED * fewest:
        steps, losses = shared.astype(np.int64), (run.losses[mine], baseline.losses[theirs])
    else:
        edges = np.arange(first, last + 1, spacing)
        means = [_means(curve, edges, spacing) for curve in (run, baseline)]
        both = ~np.isnan(means[0]) & ~np.isnan(means[1])
        steps, losses = edges[both].astype(np.int64), (means[0][both], means[1][both])
    return AlignedLosses(steps, *losses, spacing, _correlation(*losses), baseline.percent_base)


def _spacing(steps: Ints) -> int:
    return max(1, round(float(np.median(np.diff(steps))))) if len(steps) > 1 else 1


def _means(curve: LossCurve, edges: Ints, width: int) -> Floats:
    """Return the mean loss of each interval of `width` steps; NaN for an interval without losses."""
    at = (curve.steps - edges[0]) // width
    kept = (curve.steps >= edges[0]) & (at < len(edges))
    sums = np.bincount(at[kept], curve.losses[kept], len(edges))
    counts = np.bincount(at[kept], minlength=len(edges))
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _correlation(run: Floats, baseline: Floats) -> float:
    """Return the rank correlation of the two losses' changes from place to place.

    First subtract the running median of the changes, because all steep losses change alike. Ranks limit the effect of
    spikes.
    """
    finite = np.isfinite(run) & np.isfinite(baseline)
    moves = [np.diff(losses[finite]) for losses in (run, baseline)]
    if len(moves[0]) < 8:
        return float("nan")
    mine, theirs = (_ranks(each - compute_running_median(each, 5)) for each in moves)
    with np.errstate(invalid="ignore"):  # constant losses cause a division by zero
        return float(np.corrcoef(mine, theirs)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value. Equal values get their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return ranks


#: fraction of the shared steps, at their end, over which means are compared, and the least number of losses in this part
PART, FEWEST = 0.2, 20
#: least number of losses from which we measure a gap
TOO_FEW = 10
#: confidence of the printed interval, and the probability with which a gap of the smallest visible size is detected
CONFIDENCE, POWER = 0.95, 0.8
CHECK_DATA = "Before you trust this loss, check for repeated data, leaked labels or a missing mask."


@dataclass(frozen=True)
class Gap:
    """The difference between the mean losses of a run and of a baseline over the last part of the steps, in percent.

    Percentages are relative to the baseline's level or range. They are negative if the run's loss is lower.
    """

    percent: float
    #: standard error of `percent`, and its degrees of freedom
    error: float
    freedom: int
    #: first and last step that are compared, and the number of losses
    first: int
    last: int
    n: int
    #: whether both runs saw the same batches in the same order, and the correlation from which we conclude this
    paired: bool
    correlation: float
    #: number of places that are left out because the loss of either run is NaN or infinite
    left_out: int = 0
    #: whether percentages are relative to the range of the baseline's losses, because these cross zero or come very near it
    of_range: bool = False

    def compute_confidence_interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the two-sided confidence interval of the gap, in percent."""
        reach = self.error * float(stdtrit(self.freedom, 0.5 + confidence / 2)) if self.error else 0.0
        return self.percent - reach, self.percent + reach

    @property
    def visible(self) -> float:
        """Return the smallest gap, in percent, for which the interval excludes 0 with a probability of 80%."""
        reach = stdtrit(self.freedom, 0.5 + CONFIDENCE / 2) + stdtrit(self.freedom, POWER)
        return self.error * float(reach) if self.error else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return percent, low and high (bounds of the 95% interval), visible, first, last, n, paired, left_out and
        of_range.
        """
        low, high = self.compute_confidence_interval()
        named = {name: getattr(self, name) for name in ("first", "last", "n", "paired", "left_out", "of_range")}
        return {"percent": self.percent, "low": low, "high": high, "visible": self.visible} | named

    @property
    def ends_nonfinite(self) -> bool:
        """Return True if the run's loss ends in NaN or infinity, or has too few finite values to average."""
        return not np.isfinite(self.percent)


def measure_gap(run: LossCurve, baseline: LossCurve, part: float = PART, after: int | None = None) -> Gap | None:
    """Measure the gap of a run's loss to a baseline's loss, at the steps that both have.

    The standard error is the error of the mean of run - ratio * baseline (delta method), and accounts for autocorrelation.
    It is valid both if the runs saw the same batches, so that noise cancels, and if they saw other batches, so that noise
    adds up.

    Args:
        part: last part of the shared steps that is compared.
        after: compare only steps after this step, instead of `part`.

    Returns:
        The gap, or None if both runs have fewer than 10 losses in common, or if all losses of the baseline are zero.

    Example:
        >>> import numpy as np, polars as pl
        >>> noise = np.random.default_rng(0).normal(0, 0.02, 500)
        >>> tables = [pl.DataFrame({"step": range(500), "loss": 2 * (1 + noise) * f}) for f in (1.01, 1.0)]
        >>> found = measure_gap(*map(LossCurve.from_steps_table, tables))
        >>> round(found.percent, 3), found.n, found.paired
        (1.0, 100, True)
    """
    return measure_aligned_gap(align_losses(run, baseline), part, after)


def measure_aligned_gap(
    aligned: AlignedLosses, part: float = PART, after: int | None = None, fewest: int = FEWEST
) -> Gap | None:
    """Measure the gap of losses that are already aligned; see `measure_gap`."""
    aligned = aligned.select_last_part(part, after, fewest)
    known = np.isfinite(aligned.baseline)
    finite = known & np.isfinite(aligned.run)
    if known.sum() < TOO_FEW or (aligned.scale is None and not float(np.mean(aligned.baseline[known]))):
        return None
    ends = int(aligned.steps[0]), int(aligned.steps[-1])
    measured = np.inf, 0.0, 1
    if not _gone(aligned.run) and finite.sum() >= TOO_FEW:
        measured = relative(aligned.run[finite], aligned.baseline[finite], aligned.scale and aligned.scale.value)
    left_out, of_range = int((~finite).sum()), aligned.scale is not None and aligned.scale.is_range
    return Gap(*measured, *ends, int(finite.sum()), aligned.has_shared_noise, aligned.correlation, left_out, of_range)


def relative(run: Floats, baseline: Floats, whole: float | None = None) -> tuple[float, float, int]:
    """Return the gap in percent, its standard error and its degrees of freedom, for losses at the same steps.

    Args:
        whole: the value that counts as 100%; None: the baseline's level, which may be negative.
    """
    if whole is not None:
        error, freedom = estimate_standard_error(run - baseline)
        return 100 * float(run.mean() - baseline.mean()) / whole, 100 * error / whole, freedom
    level = float(baseline.mean())
    ratio = float(run.mean()) / level
    error, freedom = estimate_standard_error(run - ratio * baseline)
    return 100 * (ratio - 1 if level > 0 else 1 - ratio), 100 * error / abs(level), freedom


def _gone(losses: Floats) -> bool:
    """Return True if the last two losses are NaN or infinite."""
    return bool(len(losses) > 1 and not np.isfinite(losses[-2:]).any())


def find_rise_above_baseline(run: LossCurve, baseline: LossCurve) -> int | None:
    """Return the first step from which a run's loss stays above a baseline's loss, or None if no such rise is visible.

    Compare the run either with the baseline's loss at each step, or with the baseline's running median. Choose the
    comparison with less noise, because runs with the same batches share most of their noise.

    Example:
        >>> import polars as pl
        >>> tables = [pl.DataFrame({"step": range(100), "loss": [2.0] * 60 + [2 + rise] * 40}) for rise in (0.1, 0.0)]
        >>> find_rise_above_baseline(*map(LossCurve.from_steps_table, tables))
        60
    """
    if not len(run.losses) or not len(baseline.losses):
        return None
    aligned = align_losses(run, baseline)
    n = len(aligned.steps)
    if n < 2:
        return None
    half = max(2, n // 12)
    apart, smooth, noise = min((_apart(aligned, each, half) for each in (True, False)), key=lambda found: found[2])
    first = find_lasting_start(smooth > thresholds.DEPARTS_SIGMAS * noise, apart, half)
    if first is None:
        return None
    # If the rise exceeds three times the limit, no second test is needed.
    plain = float(np.median(smooth[first:])) > 3 * thresholds.DEPARTS_SIGMAS * noise
    return int(aligned.steps[first]) if plain or _is_sure(aligned, first) else None


def _apart(aligned: AlignedLosses, by_batch: bool, half: int) -> tuple[Floats, Floats, float]:
    """Return the run's distance above the baseline, the running median of this distance, and the noise of the median."""
    reference = aligned.baseline if by_batch else compute_running_median(aligned.baseline, half)
    with np.errstate(invalid="ignore"):
        # If both losses are infinite, the distance is 0.
        apart = np.nan_to_num(aligned.run - reference, nan=0.0, posinf=np.inf, neginf=-np.inf)
        smooth = compute_running_median(apart, half)
        noise = _noise(apart - smooth, half)
        if not by_batch:
            noise = float(np.hypot(noise, _noise(aligned.baseline - reference, half)))
    return apart, smooth, noise


def _noise(apart: Floats, half: int) -> float:
    """Return the standard deviation of a running median over noise with the same scatter and autocorrelation as `apart`."""
    finite = apart[np.isfinite(apart)]
    if not len(finite):
        return 0.0
    scatter = float(np.median(np.abs(finite))) / 0.6745
    return float(np.sqrt(np.pi / 2) * scatter * compute_autocorrelation_factor(finite) / np.sqrt(2 * half + 1))


def _is_sure(aligned: AlignedLosses, first: int) -> bool:
    """Return True if the mean loss after `first` is significantly above the baseline's mean loss, or if there are too few
    losses to test this. Only the last part of the losses is tested, even if `first` is earlier.
    """
    n = len(aligned.steps)
    start = max(min(max(first, round((1 - PART) * n)), n - TOO_FEW), 0)
    found = measure_aligned_gap(aligned, after=int(aligned.steps[start]) - 1)
    return found is None or found.ends_nonfinite or found.compute_confidence_interval(thresholds.SURE)[0] > 0
