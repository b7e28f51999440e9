"""Describe the loss of a run: its minimum, its noise, and the step at which it diverged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.fft import dct

from .. import thresholds

Floats = npt.NDArray[np.float64]

#: largest order of an autoregression, and largest sum of its weights
_MOST_LAGS, _MOST_CARRIED = 10, 0.97


def compute_running_median(values: Floats, half: int) -> Floats:
    """Return the running median of a series. The window covers `half` values on either side of a value, and keeps its full
    width at both ends of the series.
    """
    width = min(len(values), 2 * half + 1)
    if not width:
        return values
    medians = pl.Series(values).rolling_median(width).to_numpy()[width - 1 :]
    result: Floats = medians[np.clip(np.arange(len(values)) - half, 0, len(values) - width)]
    return result


def estimate_standard_error(values: Floats) -> tuple[float, int]:
    """Return the standard error of the mean of an autocorrelated series, and its degrees of freedom for Student's t.

    An autoregression of an order chosen by AIC removes most dependence (Andrews and Monahan, Econometrica 60, 1992).
    The variance of the mean of its residuals is the mean square of their first 0.41 n^(2/3) cosine coefficients
    (Lazarus, Lewis, Stock and Watson, JBES 36, 2018).

    Args:
        values: the series, [n], with n at least 10.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=1000)
        >>> error, freedom = estimate_standard_error(noise)
        >>> round(error * 1000**0.5, 1), freedom
        (0.9, 40)
    """
    apart = values - values.mean()
    weights = _autoregression(apart)
    rest = apart[len(weights) :] - _lagged(apart, len(weights)) @ weights
    n, freedom = len(rest), min(len(rest) - 1, max(4, int(0.41 * len(rest) ** (2 / 3))))
    coefficients = dct(rest - rest.mean(), norm="ortho")[1 : freedom + 1]
    carried = float(weights.sum())
    if len(weights):  # correct the bias of the estimate (Kendall, Biometrika 41, 1954)
        carried = min(carried + (1 + 3 * carried) / n, _MOST_CARRIED)
    return float(np.sqrt(np.mean(coefficients**2) / len(values))) / (1 - carried), freedom


def _autoregression(apart: Floats) -> Floats:
    """Return the weights of an autoregression, lag 1 first. Akaike's criterion determines the order of the
    autoregression.
    """
    most = min(int(len(apart) ** (1 / 3)), _MOST_LAGS)
    if not apart.any():
        return np.zeros(0)
    target, lags = apart[most:], _lagged(apart, most)
    found: list[tuple[float, Floats]] = []
    for order in range(most + 1):
        weights = np.linalg.lstsq(lags[:, :order], target, rcond=None)[0]
        left = float(np.mean((target - lags[:, :order] @ weights) ** 2))
        found.append((len(target) * np.log(max(left, 1e-300)) + 2 * order, weights))
    return min(found, key=lambda each: each[0])[1]


def _lagged(values: Floats, order: int) -> Floats:
    """For each value that has `order` values before it, return these values, lag 1 first, [n - order, order]."""
    if not order:
        return np.empty((len(values), 0))
    return np.lib.stride_tricks.sliding_window_view(values[:-1], order)[:, ::-1]


def compute_autocorrelation_factor(noise: Floats) -> float:
    """Return the factor by which first-order autocorrelation widens the standard error of a mean.

    Values are clipped at three standard deviations, because a steep part of a curve is not noise.
    """
    finite = noise[np.isfinite(noise)]
    most = 3 * np.median(np.abs(finite)) / 0.6745 if len(finite) else 0.0
    if len(finite) < 8 or not most:
        return 1.0
    clipped = np.clip(finite, -most, most)
    first = min(max(float(np.corrcoef(clipped[:-1], clipped[1:])[0, 1]), 0.0), _MOST_CARRIED)
    return float(np.sqrt((1 + first) / (1 - first)))


#: number of standard deviations at which values are clipped, so that a steep rise is detected at its first step
_HIGH = 6.0
#: least standard deviation as a fraction of the largest value, for series without noise
_LEAST = 1e-6


def find_lasting_start(high: npt.NDArray[np.bool_], apart: Floats, half: int, after: int = -1) -> int | None:
    """Return the first index after `after` from which a series stays high to its end, or None if there is no such index.

    A high part that is shorter than half a window does not count.

    Args:
        high: for each index, whether the smoothed series is high.
        apart: the series before smoothing, minus its usual value. It determines the exact start, because smoothing shifts
            the start.
        half: half the width of the smoothing window.

    Example:
        >>> apart = np.repeat([0.0, 1.0], 20)
        >>> find_lasting_start(apart > 0.5, apart, 4)
        20
    """
    low = np.flatnonzero(~high)
    first = max(after, int(low[-1]) if len(low) else -1) + 1
    if first >= len(high) - half:
        return None
    return _exactly(apart, first, half)


def _exactly(apart: Floats, first: int, half: int) -> int:
    """Return the index near `first` that best splits the values into two levels."""
    start, stop = max(first - 2 * half, 0), min(first + 2 * half, len(apart))
    before = apart[max(start - half, 0) : max(first - half, 2)] if first else np.zeros(1)
    before = before[np.isfinite(before)]
    usual = float(np.median(before)) if len(before) else 0.0
    spread = 1.4826 * float(np.median(np.abs(before - usual))) if len(before) else 0.0
    largest = float(np.max(np.abs(apart), where=np.isfinite(apart), initial=0.0))
    spread = max(spread, _LEAST * largest) or 1.0
    values = np.clip(np.nan_to_num(apart[start:stop] - usual, nan=0.0, posinf=np.inf), -_HIGH * spread, _HIGH * spread)
    counts = np.arange(1, len(values))
    sums = np.cumsum(values)
    left, right = sums[:-1] / counts, (sums[-1] - sums[:-1]) / (len(values) - counts)
    explained = counts * left**2 + (len(values) - counts) * right**2
    near = slice(max(first - half - start - 1, 0), first + half - start)
    at = near.start + int(np.argmax(explained[near]))
    # If a series is high from the beginning, there is no lower level before.
    return 0 if first == 0 and left[at] > right[at] / 2 else start + 1 + at


#: fraction of the losses to ignore at either end of their range, so that a single spike does not change the range, or the
#: sign of the smallest loss
_TAIL = 0.01


class PercentBase(NamedTuple):
    """The value that counts as 100% of a rise or gap, for a loss that crosses zero or comes very near it."""

    value: float
    #: True if the value is the range of the losses, False if it is their final level
    is_range: bool

    @staticmethod
    def choose_base_value(scale: PercentBase | None, level: float) -> float:
        """Return the value that counts as 100%: the scale if there is one, otherwise the level."""
        return abs(level) if scale is None else scale.value


def measure_scale(losses: Floats) -> PercentBase | None:
    """Return the scale of losses that cross zero or come very near it; None for all other losses.

    Percentages of a level near zero are meaningless, so such losses use one scale for all steps: their final level. If the
    final level is also near zero, or if a positive loss fell to a thousandth of its highest value, the scale is the range of
    the losses.

    Example:
        >>> measure_scale(np.linspace(3, 1, 500)), measure_scale(np.linspace(-1, -3, 500))
        (None, None)
        >>> both = measure_scale(np.linspace(2, -3, 500)), measure_scale(np.geomspace(2, 1e-5, 500))
        >>> [(round(scale.value, 1), scale.is_range) for scale in both]
        [(2.8, False), (1.8, True)]
    """
    finite = losses[np.isfinite(losses)]
    low, high = np.quantile(finite, (_TAIL, 1 - _TAIL)) if len(finite) else (0.0, 0.0)
    if high <= 0 or low >= thresholds.NEAR_ZERO * high:
        return None
    level, whole = abs(float(finite[-max(len(finite) // 10, 1) :].mean())), float(high - low)
    return PercentBase(level, False) if low < 0 and level > thresholds.LEVEL_NEAR_ZERO * whole else PercentBase(whole, True)


@dataclass(frozen=True)
class LossCurve:
    """Losses by step, and their running median over a sixth of the run. A single spike does not change the median."""

    steps: npt.NDArray[np.int64]
    losses: Floats
    smooth: Floats
    #: half the width of the running median, in steps
    half: int

    @classmethod
    def from_steps_table(cls, table: pl.DataFrame) -> LossCurve:
        """Build a curve from the `steps` table of a record. A non-finite loss becomes infinite."""
        table = table.filter(pl.col("loss").is_not_null()).unique("step", keep="last").sort("step")
        losses = table["loss"].to_numpy().astype(np.float64)
        losses = np.where(np.isfinite(losses), losses, np.inf)
        half = max(2, len(losses) // 12)
        return cls(table["step"].to_numpy(), losses, compute_running_median(losses, half), half)

    @cached_property
    def percent_base(self) -> PercentBase | None:
        """Return the scale for rises above this loss, or None if rises are relative to the level of the loss. See
        `measure_scale`.
        """
        return measure_scale(self.losses)

    @property
    def falls_near_zero(self) -> bool:
        """Return True if the loss falls to a thousandth of its highest value, so that most gradients are nearly zero."""
        return self.percent_base is not None and self.percent_base.is_range and bool((self.losses >= 0).all())

    @property
    def is_negative_from_zero(self) -> bool:
        """Return True if most losses are negative, and the first losses are near zero (within a tenth of the range)."""
        finite = self.losses[np.isfinite(self.losses)]
        if not len(finite) or np.median(finite) >= 0:
            return False
        first = float(np.median(finite[: max(3, len(finite) // 30)]))
        return abs(first) < thresholds.LEVEL_NEAR_ZERO * float(np.ptp(finite))

    def measure_percent_base_before(self, step: int) -> PercentBase | None:
        """Return the scale of the losses before a step; see `measure_scale`."""
        return measure_scale(self.losses[self.steps < step])

    def raise_by_percent(self, percent: float) -> LossCurve:
        """Return the curve with all losses raised by a percentage."""
        part, both = percent / 100, (self.losses, self.smooth)
        losses, smooth = (
            each + part * (np.abs(each) if self.percent_base is None else self.percent_base.value) for each in both
        )
        return LossCurve(self.steps, losses, smooth, self.half)

    def has_equal_losses(self, other: LossCurve) -> bool:
        """Return True if all losses are equal, as when the same record is given under two names."""
        return np.array_equal(self.steps, other.steps) and np.array_equal(self.losses, other.losses)

    @property
    def final_loss(self) -> float | None:
        """Return the smoothed loss at the end, or None without losses."""
        return float(self.smooth[-1]) if len(self.smooth) else None

    @property
    def minimum_step_and_loss(self) -> tuple[int, float] | None:
        """Return the step and the value of the smoothed loss's minimum, or None without finite losses."""
        if not np.isfinite(self.smooth).any():
            return None
        i = int(np.argmin(self.smooth))
        return int(self.steps[i]), float(self.smooth[i])

    @property
    def scatter_around_median(self) -> float:
        """Return the standard deviation of the losses around the smoothed loss, estimated from the median distance."""
        finite = np.isfinite(self.losses) & np.isfinite(self.smooth)
        if not finite.any():
            return 0.0
        return float(np.median(np.abs(self.losses[finite] - self.smooth[finite]))) / 0.6745

    @property
    def noise_of_smoothed_loss(self) -> float:
        """Return the standard deviation that noise causes in the smoothed loss. The formula assumes a running median over
        Gaussian noise with the same autocorrelation.
        """
        with np.errstate(invalid="ignore"):
            lasting = compute_autocorrelation_factor(self.losses - self.smooth)
        return float(np.sqrt(np.pi / 2) * self.scatter_around_median * lasting / np.sqrt(2 * self.half + 1))

    @property
    def has_enough_losses(self) -> bool:
        """Return True if there are enough losses to decide whether they diverge."""
        return len(self.losses) > 2 * self.half

    @property
    def all_nonfinite_from_step(self) -> int | None:
        """Return the first step from which no loss is finite, or None if one of the last two losses is finite."""
        lost = ~np.isfinite(self.losses)
        if len(lost) < 2 or not lost[-2:].all():
            return None
        numbers = np.flatnonzero(~lost)
        return int(self.steps[numbers[-1] + 1 if len(numbers) else 0])

    @cached_property
    def percent_base_above_minimum(self) -> PercentBase | None:
        """Return the scale for rises above the smoothed minimum, measured from the losses up to this minimum. If the result
        is None, rises are relative to the value of the minimum.
        """
        return measure_scale(self.losses[: int(np.argmin(self.smooth)) + self.half + 1]) if len(self.smooth) else None

    def _whole(self, floor: float) -> float:
        return PercentBase.choose_base_value(self.percent_base_above_minimum, floor)

    def _least_rise(self, floor: float) -> float:
        # Because of noise, the minimum of a smoothed curve is 3 to 4 standard deviations lower than without noise.
        return max(
            thresholds.MAX_GAP / 100 * self._whole(floor), 2 * thresholds.DEPARTS_SIGMAS * self.noise_of_smoothed_loss
        )

    @property
    def smallest_visible_rise(self) -> float:
        """Return the smallest rise above the smoothed minimum that counts, in percent; NaN without losses."""
        floor = float(self.smooth.min()) if len(self.smooth) else 0.0
        return 100 * self._least_rise(floor) / whole if (whole := self._whole(floor)) else float("nan")

    @cached_property
    def level_shift(self) -> tuple[int, float] | None:
        """Return the step at which the loss goes up to another level, and the rise in percent, or None if there is no such
        step.

        Compare the median of the losses before a step (a twelfth of all losses) with the lower of the next two such medians.
        A spike does not count, because the loss falls back after it.
        """
        before, after = self._levels()
        if not len(before):
            return None
        noise = np.sqrt(2) * self.noise_of_smoothed_loss * np.sqrt((2 * self.half + 1) / self.half)
        with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
            rise = after - before
        at = int(np.argmax(np.where(np.isfinite(rise), rise, -np.inf)))
        step = int(self.steps[at + self.half])
        whole = PercentBase.choose_base_value(self.measure_percent_base_before(step), float(before[at]))
        if not rise[at] > max(thresholds.LEVEL_SIGMAS * noise, thresholds.LEVEL_PART * whole):
            return None
        return step, 100 * float(rise[at]) / whole

    def _levels(self) -> tuple[Floats, Floats]:
        """Return two arrays, with a value for each step that has `half` losses before and after it: the median of the `half`
        losses before the step, and the lower of the medians of the next and of the following `half` losses.
        """
        medians = pl.Series(self.losses).rolling_median(self.half).to_numpy()[self.half - 1 :]
        later = medians[self.half :]
        return medians[: len(later)], np.minimum(later, _shifted(later, self.half))

    @property
    def divergence_step(self) -> int | None:
        """Return the first step from which the smoothed loss stays above its own minimum, or None if there is no such
        step.
        """
        if not len(self.smooth):
            return None
        lowest = int(np.argmin(self.smooth))
        floor = float(self.smooth[lowest])
        high = self.smooth > floor + self._least_rise(floor)
        with np.errstate(invalid="ignore"):
            first = find_lasting_start(high, self.losses - floor, self.half, after=lowest)
        return None if first is None else int(self.steps[first])


def _shifted(values: Floats, by: int) -> Floats:
    """Return the series shifted by `by` places, so that each value comes earlier. At the end, repeat the last value."""
    later: Floats = values[np.minimum(np.arange(len(values)) + by, len(values) - 1)]
    return later
