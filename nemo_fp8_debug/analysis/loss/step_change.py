"""Test whether the loss rose at a step. If other evidence names the step, a far smaller rise is significant than if we
search all steps for a rise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtr

from .. import thresholds
from .curve import LossCurve, PercentBase, compute_autocorrelation_factor, compute_running_median, estimate_standard_error
from .gap import PART, AlignedLosses, Floats, Ints, align_losses

#: number of losses to compare on either side of a step: all losses divided by `_PART`, but at least `_FEWEST`
_PART, _FEWEST = 6, 10
#: number of losses to compare if we search for a step: all losses divided by `_BEHIND` after a step, and `_BEFORE` times as
#: many before it
_BEHIND, _BEFORE = 20, 2
#: a loss is a spike if it deviates by more than this many standard deviations of the noise
_SPIKE = 3.0


class Rise(NamedTuple):
    """The difference between the mean loss after a step and the mean loss before it."""

    percent: float
    #: probability that noise alone causes a rise of this size
    chance: float
    #: growth of the gap to a baseline of other batches, in percent, from before the step to the end; infinite without a
    #: baseline
    lasting: float

    @property
    def is_sure(self) -> bool:
        """Return True if noise is very unlikely to cause this rise."""
        return self.chance < 1 - thresholds.STEP_SURE


def measure_loss_rise_at_step(run: LossCurve, baseline: LossCurve | None, step: int) -> float | None:
    """Return the rise of the loss at a step in percent, or None if no rise is visible.

    Without a baseline, the result for a falling loss is smaller than the true rise. With a baseline of other batches, only
    changes are compared, so a constant gap does not count.

    Args:
        step: a step that other evidence names.

    Example:
        >>> import polars as pl
        >>> losses = np.where(np.arange(200) < 120, 2.0, 2.4) + np.random.default_rng(0).normal(0, 0.05, 200)
        >>> curve = LossCurve.from_steps_table(pl.DataFrame({"step": range(200), "loss": losses}))
        >>> round(measure_loss_rise_at_step(curve, None, 120))
        20
    """
    found = _rise_at(run, baseline, step)
    return found.percent if found is not None and found.is_sure else None


def measure_loss_rise_at_fault(
    run: LossCurve, baseline: LossCurve | None, step: int, sampled: Ints, lasting: float = -np.inf
) -> float | None:
    """Return the rise of the loss in percent at a fault that was detected in a sample, or None if no rise is visible.

    The fault may have begun at any step since the previous sample, so return the larger of the rises at both ends of this
    interval.

    Args:
        step: the step of the sample.
        sampled: sampled steps, int64 [S], ascending. If `step` is not among them, only `step` itself is tested.
        lasting: a rise counts only if the gap to a baseline of other batches grows by more than this percentage until the
            end.

    Example:
        >>> import polars as pl
        >>> losses = np.where(np.arange(200) < 116, 2.0, 2.4) + np.random.default_rng(0).normal(0, 0.05, 200)
        >>> curve = LossCurve.from_steps_table(pl.DataFrame({"step": range(200), "loss": losses}))
        >>> round(measure_loss_rise_at_fault(curve, None, 120, np.arange(0, 200, 5)))
        21
    """
    rises = _rises_with(run, baseline, step, sampled)
    return max((rise.percent for rise in rises if rise.is_sure and rise.lasting > lasting), default=None)


def measure_gap_growth_at_fault(run: LossCurve, baseline: LossCurve, step: int, sampled: Ints) -> float:
    """Return the growth of the gap to a baseline of other batches, in percent, from before a fault that was detected in a
    sample to the end.

    The fault may have begun right after the previous sample. Return infinity if there are too few losses before the fault.

    Example:
        >>> import polars as pl
        >>> losses = 2 + np.random.default_rng(0).normal(0, 0.05, (2, 300))
        >>> losses[0, 200:] += 0.2
        >>> bad, good = (LossCurve.from_steps_table(pl.DataFrame({"step": range(300), "loss": each})) for each in losses)
        >>> [round(measure_gap_growth_at_fault(bad, good, step, np.arange(0, 300, 10))) for step in (210, 280)]
        [10, 0]
    """
    if _rise_at(run, baseline, _may_have_begun(step, sampled)) is None:
        return np.inf
    return max((rise.lasting for rise in _rises_with(run, baseline, step, sampled)), default=np.inf)


def _rises_with(run: LossCurve, baseline: LossCurve | None, step: int, sampled: Ints) -> list[Rise]:
    places = {step, _may_have_begun(step, sampled)}
    return [rise for each in sorted(places) if (rise := _rise_at(run, baseline, each)) is not None]


def _may_have_begun(step: int, sampled: Ints) -> int:
    """Return the first step at which a fault that was detected in a sample may have begun."""
    before = sampled[sampled < step]
    return int(before[-1]) + 1 if step in sampled and len(before) else step


def _rise_at(run: LossCurve, baseline: LossCurve | None, step: int) -> Rise | None:
    """Return the rise at a step, or None if too few losses surround the step; see `measure_loss_rise_at_step`."""
    steps, losses, scale = run.steps, run.losses, run.measure_percent_base_before(step)
    whole: float | None = None if scale is None else scale.value
    if baseline is not None and baseline.has_enough_losses:
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
    if len(back) < _FEWEST:  # if only a few losses are not finite, compare the others
        return Rise(np.inf, 0.0, np.inf)
    lasts = baseline is not None and len(end) >= _FEWEST
    return _rise(before, back, whole, 100 * float(end.mean() - before.mean()) / whole if lasts else np.inf)


def _rise(before: Floats, after: Floats, whole: float, lasting: float) -> Rise:
    """Compare the mean loss before and after a step.

    Args:
        whole: the value that counts as 100%.
    """
    apart = float(after.mean() - before.mean())
    errors = [estimate_standard_error(each) for each in (before, after)]
    error = float(np.hypot(errors[0][0], errors[1][0]))
    freedom = min(each[1] for each in errors)
    chance = float(stdtr(freedom, -apart / error)) if error else float(apart <= 0)
    return Rise(100 * apart / whole, chance, lasting)


def find_largest_loss_jump(run: LossCurve, baseline: LossCurve, lasting: float = 0.0) -> tuple[int, float] | None:
    """Return the step of the largest jump of a loss, and the jump in percent, or None if no jump is visible.

    Both the loss and its ratio to a baseline of other batches must jump, but the baseline's loss must not. If only the ratio
    jumps, the baseline's loss has fallen. If both losses jump, the run is not at fault.

    Args:
        lasting: least growth of the gap to the baseline until the end, in percent. This excludes spikes, because the gap
            shrinks again after a spike.

    Example:
        >>> import polars as pl
        >>> losses = 2 + np.random.default_rng(0).normal(0, 0.05, (2, 300))
        >>> losses[0, 200:] += 0.2
        >>> bad, good = (LossCurve.from_steps_table(pl.DataFrame({"step": range(300), "loss": each})) for each in losses)
        >>> find_largest_loss_jump(bad, good)[0], find_largest_loss_jump(good, bad)
        (200, None)
    """
    found = farthest_jump(run, baseline)
    return (found.step, found.percent) if found is not None and found.times > 1 and found.lasting > lasting else None


class Jump(NamedTuple):
    """The largest jump of a loss."""

    step: int
    percent: float
    #: size of the jump, in units of the smallest jump that counts
    times: float
    #: growth of the gap to the baseline until the end, in percent
    lasting: float


def farthest_jump(run: LossCurve, baseline: LossCurve) -> Jump | None:
    """Return the largest jump, or None if there are too few losses; see `find_largest_loss_jump`."""
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


def _of_its_own(aligned: AlignedLosses) -> tuple[Floats, float | None]:
    """Return the run's loss relative to the baseline's loss, and the value that counts as 100%.

    If all losses of the baseline are positive, return the ratio and None, because percentages are relative to the ratio
    before a step. Otherwise, return the difference, and the scale or the final level of the baseline's loss.
    """
    expected, known = (
        compute_running_median(aligned.baseline, max(2, len(aligned.steps) // 12)),
        np.isfinite(aligned.baseline),
    )
    if (aligned.baseline > 0).all():
        return aligned.run / expected, None
    last = aligned.baseline[known][-max(round(PART * len(aligned.steps)), 1) :]
    return aligned.run - expected, PercentBase.choose_base_value(aligned.scale, float(last.mean()) if len(last) else 0.0)


def _jumps(series: Floats, behind: int) -> tuple[Floats, float]:
    """At each index with enough values, return the mean of the next `behind` values minus the mean of the `_BEFORE * behind`
    values before.

    Also return the standard deviation of this difference that noise alone causes. Spikes are clipped to the noise.
    """
    smooth = compute_running_median(series, behind)
    scatter = float(np.median(np.abs(series - smooth))) / 0.6745
    apart = np.clip(series - smooth, -_SPIKE * scatter, _SPIKE * scatter)
    sums = np.cumsum(np.concatenate([[0.0], smooth + apart]))
    before = _BEFORE * behind
    at = np.arange(before, len(series) - behind + 1)
    jumps: Floats = (sums[at + behind] - sums[at]) / behind - (sums[at] - sums[at - before]) / before
    return jumps, scatter * compute_autocorrelation_factor(apart) * (1 / behind + 1 / before) ** 0.5
