"""Did the loss rise at a step? One at which something else went wrong needs far less than one that is searched for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtr

from .. import thresholds
from .curve import LossCurve, Scale, measure_persistence, running_median, standard_error
from .gap import PART, Aligned, Floats, Ints, align_losses

#: losses on either side of the step, at most as a part of all, and at least
_PART, _FEWEST = 6, 10
#: of a search: losses behind a step, as a part of all, and as many times as many before it; and the chance with which noise
#: alone jumps anywhere in a run
_BEHIND, _BEFORE = 20, 2
#: standard deviations of the noise beyond which a loss is a spike
_SPIKE = 3.0


class Rise(NamedTuple):
    """By how much a loss is higher after a step than before."""

    percent: float
    #: the chance with which noise makes as much
    chance: float
    #: percent by which it lies higher above a baseline of other batches in the end than before; infinite without one
    lasting: float

    @property
    def is_sure(self) -> bool:
        """Whether noise hardly makes it."""
        return self.chance < 1 - thresholds.STEP_SURE


def measure_rise(run: LossCurve, baseline: LossCurve | None, step: int) -> float | None:
    """By how many percent the loss is higher after a step than before; None: it is not, or that cannot be seen.

    A loss that falls is higher before, so without a baseline a rise is more than what is seen. With one of other batches the
    two are compared as far as they moved: that one lies above the other all along does not count.

    Args:
        step: known from elsewhere.

    Example:
        >>> import polars as pl
        >>> losses = np.where(np.arange(200) < 120, 2.0, 2.4) + np.random.default_rng(0).normal(0, 0.05, 200)
        >>> round(measure_rise(LossCurve.of(pl.DataFrame({"step": range(200), "loss": losses})), None, 120))
        20
    """
    found = _rise_at(run, baseline, step)
    return found.percent if found is not None and found.is_sure else None


def measure_rise_of_sample(
    run: LossCurve, baseline: LossCurve | None, step: int, sampled: Ints, lasting: float = -np.inf
) -> float | None:
    """The same of what a sample shows, which began between it and the sample before: the larger rise of those at either end.

    Args:
        step: at which it is seen.
        sampled: int64 [S], ascending; a step that is not among them is taken as it is.
        lasting: percent by which the run must in the end lie higher above a baseline of other batches than before.

    Example:
        >>> import polars as pl
        >>> losses = np.where(np.arange(200) < 116, 2.0, 2.4) + np.random.default_rng(0).normal(0, 0.05, 200)
        >>> curve = LossCurve.of(pl.DataFrame({"step": range(200), "loss": losses}))
        >>> round(measure_rise_of_sample(curve, None, 120, np.arange(0, 200, 5)))
        21
    """
    rises = _rises_with(run, baseline, step, sampled)
    return max((rise.percent for rise in rises if rise.is_sure and rise.lasting > lasting), default=None)


def measure_lasting_rise(run: LossCurve, baseline: LossCurve, step: int, sampled: Ints) -> float:
    """Percent by which a run lies higher above a baseline of other batches in the end than before what a sample shows, which
    may have begun at once behind the sample before; infinite where too little is known of what was before.

    Example:
        >>> import polars as pl
        >>> losses = 2 + np.random.default_rng(0).normal(0, 0.05, (2, 300))
        >>> losses[0, 200:] += 0.2
        >>> bad, good = (LossCurve.of(pl.DataFrame({"step": range(300), "loss": each})) for each in losses)
        >>> [round(measure_lasting_rise(bad, good, step, np.arange(0, 300, 10))) for step in (210, 280)]
        [10, 0]
    """
    if _rise_at(run, baseline, _may_have_begun(step, sampled)) is None:
        return np.inf
    return max((rise.lasting for rise in _rises_with(run, baseline, step, sampled)), default=np.inf)


def _rises_with(run: LossCurve, baseline: LossCurve | None, step: int, sampled: Ints) -> list[Rise]:
    places = {step, _may_have_begun(step, sampled)}
    return [rise for each in sorted(places) if (rise := _rise_at(run, baseline, each)) is not None]


def _may_have_begun(step: int, sampled: Ints) -> int:
    """The first step at which what a sample shows may have begun."""
    before = sampled[sampled < step]
    return int(before[-1]) + 1 if step in sampled and len(before) else step


def _rise_at(run: LossCurve, baseline: LossCurve | None, step: int) -> Rise | None:
    """Return the rise at a step, or None if too few losses surround the step; see `measure_rise`."""
    steps, losses, scale = run.steps, run.losses, run.scale_before(step)
    whole: float | None = None if scale is None else scale.value
    if baseline is not None and baseline.has_enough:
        aligned = align_losses(run, baseline)
        steps, losses, whole = aligned.steps, *_of_its_own(aligned)
    at = int(np.searchsorted(steps, step))
    width = max(len(steps) // _PART, _FEWEST)
    before, after = losses[max(at - width, 0) : at], losses[at : at + width]
    if min(len(before), len(after)) < _FEWEST or not np.isfinite(before).all():
        return None
    whole = whole or abs(float(before.mean()))
    if not whole:
        return None
    back, end = (each[np.isfinite(each)] for each in (after, losses[-max(round(PART * len(steps)), _FEWEST) :]))
    if len(back) < _FEWEST:  # one that was lost for a few steps has not risen by that
        return Rise(np.inf, 0.0, np.inf)
    lasts = baseline is not None and len(end) >= _FEWEST
    return _rise(before, back, whole, 100 * float(end.mean() - before.mean()) / whole if lasts else np.inf)


def _rise(before: Floats, after: Floats, whole: float, lasting: float) -> Rise:
    """
    Args:
        whole: what 100% are.
    """
    apart = float(after.mean() - before.mean())
    errors = [standard_error(each) for each in (before, after)]
    error = float(np.hypot(errors[0][0], errors[1][0]))
    freedom = min(each[1] for each in errors)
    chance = float(stdtr(freedom, -apart / error)) if error else float(apart <= 0)
    return Rise(100 * apart / whole, chance, lasting)


def find_jump(run: LossCurve, baseline: LossCurve, lasting: float = 0.0) -> tuple[int, float] | None:
    """The step at which a loss jumps farthest, and by how many percent; None: it does at none, or that cannot be seen.

    Both the loss and its ratio to that of a baseline of other batches must, and the baseline must not: a loss that a steeper
    baseline leaves behind does not jump, and what both do there is no fault of the run.

    Args:
        lasting: percent by which the run must in the end lie higher above the baseline than before: a spike comes back.

    Example:
        >>> import polars as pl
        >>> losses = 2 + np.random.default_rng(0).normal(0, 0.05, (2, 300))
        >>> losses[0, 200:] += 0.2
        >>> bad, good = (LossCurve.of(pl.DataFrame({"step": range(300), "loss": each})) for each in losses)
        >>> find_jump(bad, good)[0], find_jump(good, bad)
        (200, None)
    """
    found = farthest_jump(run, baseline)
    return (found.step, found.percent) if found is not None and found.times > 1 and found.lasting > lasting else None


class Jump(NamedTuple):
    """The farthest jump of a loss."""

    step: int
    percent: float
    #: how many times as far as counts
    times: float
    #: percent by which the run in the end lies higher above the baseline than before
    lasting: float


def farthest_jump(run: LossCurve, baseline: LossCurve) -> Jump | None:
    """Return the farthest jump, or None if there are too few losses; see `find_jump`."""
    aligned = align_losses(run, baseline)
    behind = max(len(aligned.steps) // _BEHIND, _FEWEST)
    places = len(aligned.steps) - (1 + _BEFORE) * behind + 1
    if places < 1 or not (np.isfinite(aligned.run) & np.isfinite(aligned.baseline)).all():
        return None
    own, whole = _of_its_own(aligned)
    if whole == 0 or (whole is None and not (aligned.run > 0).all()):
        return None
    series = [np.log(each) if whole is None else each / whole for each in (aligned.run, own, aligned.baseline)]
    (own, noise), (apart, of_apart), (theirs, _) = (_jumps(each, behind) for each in series)
    sizes = np.where(theirs < apart / 2, np.minimum(own, apart), 0.0)
    at = int(np.argmax(sizes))
    least = -float(ndtri((1 - thresholds.SURE) / places)) * max(noise, of_apart)
    times = float(sizes[at]) / least if least else np.inf * float(sizes[at] > 0)
    where = at + _BEFORE * behind
    lasting = series[1][-max(round(PART * len(series[1])), behind) :].mean() - series[1][at:where].mean()
    percent, lasts = (100 * float(np.expm1(each) if whole is None else each) for each in (sizes[at], lasting))
    return Jump(int(aligned.steps[where]), percent, float(np.nan_to_num(times)), lasts)


def _of_its_own(aligned: Aligned) -> tuple[Floats, float | None]:
    """Return what the run did of its own, and what 100% of that are.

    If the baseline's losses are all positive, it is the run's loss in units of the baseline's, of which percents are of the
    value before (None). Otherwise, it is their difference.
    """
    expected, known = running_median(aligned.baseline, max(2, len(aligned.steps) // 12)), np.isfinite(aligned.baseline)
    if (aligned.baseline > 0).all():
        return aligned.run / expected, None
    last = aligned.baseline[known][-max(round(PART * len(aligned.steps)), 1) :]
    return aligned.run - expected, Scale.choose(aligned.scale, float(last.mean()) if len(last) else 0.0)


def _jumps(series: Floats, behind: int) -> tuple[Floats, float]:
    """Of each place that has as many before it, the mean of some values from there on above that of those before; and the
    standard deviation of that of noise like this one. Of a lone spike no more counts than of the noise."""
    smooth = running_median(series, behind)
    scatter = float(np.median(np.abs(series - smooth))) / 0.6745
    apart = np.clip(series - smooth, -_SPIKE * scatter, _SPIKE * scatter)
    sums = np.cumsum(np.concatenate([[0.0], smooth + apart]))
    before = _BEFORE * behind
    at = np.arange(before, len(series) - behind + 1)
    jumps: Floats = (sums[at + behind] - sums[at]) / behind - (sums[at] - sums[at - before]) / before
    return jumps, scatter * measure_persistence(apart) * (1 / behind + 1 / before) ** 0.5
