"""Describe the loss of a run: how low it fell, whether it went bad, and since when."""

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

#: values before that an autoregression looks at, at most, and what it carries on of them in all, at most
_MOST_LAGS, _MOST_CARRIED = 10, 0.97


def running_median(values: Floats, half: int) -> Floats:
    """Over `half` values on either side, windows as wide at either end as in the middle."""
    width = min(len(values), 2 * half + 1)
    if not width:
        return values
    medians = pl.Series(values).rolling_median(width).to_numpy()[width - 1 :]
    result: Floats = medians[np.clip(np.arange(len(values)) - half, 0, len(values) - width)]
    return result


def standard_error(values: Floats) -> tuple[float, int]:
    """Of the mean of a series whose values depend on those before, and its degrees of freedom for Student's t.

    An autoregression takes most of the dependence out (Andrews and Monahan, Econometrica 60, 1992; its order by AIC). The
    variance of the mean of what remains is the mean of the squares of its first cosine coefficients, 0.41 n^(2/3) of them
    (Lazarus, Lewis, Stock and Watson, JBES 36, 2018).

    Args:
        values: [n], n at least 10.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=1000)
        >>> error, freedom = standard_error(noise)
        >>> round(error * 1000**0.5, 1), freedom
        (0.9, 40)
    """
    apart = values - values.mean()
    weights = _autoregression(apart)
    rest = apart[len(weights) :] - _lagged(apart, len(weights)) @ weights
    n, freedom = len(rest), min(len(rest) - 1, max(4, int(0.41 * len(rest) ** (2 / 3))))
    coefficients = dct(rest - rest.mean(), norm="ortho")[1 : freedom + 1]
    carried = float(weights.sum())
    if len(weights):  # its estimate is too small by that much (Kendall, Biometrika 41, 1954)
        carried = min(carried + (1 + 3 * carried) / n, _MOST_CARRIED)
    return float(np.sqrt(np.mean(coefficients**2) / len(values))) / (1 - carried), freedom


def _autoregression(apart: Floats) -> Floats:
    """Weights of the values before, the last one first; of the order that Akaike's criterion prefers."""
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
    """[n - order, order]: of each value those before it, the last one first."""
    if not order:
        return np.empty((len(values), 0))
    return np.lib.stride_tricks.sliding_window_view(values[:-1], order)[:, ::-1]


def measure_persistence(noise: Floats) -> float:
    """By what factor dependence on the value before widens the standard error of a mean, as if of first order.

    Values beyond three standard deviations count as three: a steep part of a curve is not its noise.
    """
    finite = noise[np.isfinite(noise)]
    most = 3 * np.median(np.abs(finite)) / 0.6745 if len(finite) else 0.0
    if len(finite) < 8 or not most:
        return 1.0
    clipped = np.clip(finite, -most, most)
    first = min(max(float(np.corrcoef(clipped[:-1], clipped[1:])[0, 1]), 0.0), _MOST_CARRIED)
    return float(np.sqrt((1 + first) / (1 - first)))


#: standard deviations from which on values count as equally high: a steep rise is found where it begins
_HIGH = 6.0
#: of the largest value, the standard deviation that is assumed where there is no noise
_LEAST = 1e-6


def find_lasting_start(high: npt.NDArray[np.bool_], apart: Floats, half: int, after: int = -1) -> int | None:
    """First place behind `after` from which a series is high to its end, for longer than half a window; None: it is not.

    Args:
        high: whether the smoothed series is high.
        apart: the series itself, less what is usual; medians turn a little early or late, it tells exactly.
        half: half the width of the smoothing.

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
    """The place around `first` that splits the values best in two levels."""
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
    # What is high from the beginning has no lower level before.
    return 0 if first == 0 and left[at] > right[at] / 2 else start + 1 + at


#: part of the losses left out at either end of their range: a single spike sets neither the range nor the signs
_TAIL = 0.01


class Scale(NamedTuple):
    """What 100% of a rise or gap are, of a loss whose level cannot serve at every step."""

    value: float
    #: whether it is the range of the losses, and not the level they end at
    is_range: bool

    @staticmethod
    def choose(scale: Scale | None, level: float) -> float:
        """Return what 100% are: the scale, or without one the level."""
        return abs(level) if scale is None else scale.value


def measure_scale(losses: Floats) -> Scale | None:
    """Return the scale of losses that cross zero or come very near it. None: their level serves at every step.

    A loss that crosses zero passes levels of which percents have any size, so one scale serves all steps: the level that
    it ends at. If that level is near zero too, or if the loss fell to a thousandth, the scale is the range of the losses.

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
    return Scale(level, False) if low < 0 and level > thresholds.LEVEL_NEAR_ZERO * whole else Scale(whole, True)


@dataclass(frozen=True)
class LossCurve:
    """Losses by step, and their running median over a sixth of the run, which a lone spike does not move."""

    steps: npt.NDArray[np.int64]
    losses: Floats
    smooth: Floats
    #: half the width of the running median, in steps
    half: int

    @classmethod
    def of(cls, table: pl.DataFrame) -> LossCurve:
        """From the `steps` table of a record; a non-finite loss counts as infinite."""
        table = table.filter(pl.col("loss").is_not_null()).unique("step", keep="last").sort("step")
        losses = table["loss"].to_numpy().astype(np.float64)
        losses = np.where(np.isfinite(losses), losses, np.inf)
        half = max(2, len(losses) // 12)
        return cls(table["step"].to_numpy(), losses, running_median(losses, half), half)

    @cached_property
    def scale(self) -> Scale | None:
        """What 100% of a rise above this loss are; None: its level. See `measure_scale`."""
        return measure_scale(self.losses)

    @property
    def vanishes(self) -> bool:
        """Return True if the loss falls to a thousandth, so that most gradients are nearly zero and some are not."""
        return self.scale is not None and self.scale.is_range and bool((self.losses >= 0).all())

    @property
    def is_negative_from_zero(self) -> bool:
        """Whether the loss is negative and its first values are within a tenth of its range from zero."""
        finite = self.losses[np.isfinite(self.losses)]
        if not len(finite) or np.median(finite) >= 0:
            return False
        first = float(np.median(finite[: max(3, len(finite) // 30)]))
        return abs(first) < thresholds.LEVEL_NEAR_ZERO * float(np.ptp(finite))

    def scale_before(self, step: int) -> Scale | None:
        """Return the same for the losses before a step."""
        return measure_scale(self.losses[self.steps < step])

    def raised(self, percent: float) -> LossCurve:
        """Return the curve with all losses higher by a percentage."""
        part, both = percent / 100, (self.losses, self.smooth)
        losses, smooth = (each + part * (np.abs(each) if self.scale is None else self.scale.value) for each in both)
        return LossCurve(self.steps, losses, smooth, self.half)

    def same_as(self, other: LossCurve) -> bool:
        """Whether all losses are the same: a record may have two names."""
        return np.array_equal(self.steps, other.steps) and np.array_equal(self.losses, other.losses)

    @property
    def final(self) -> float | None:
        """Smoothed loss at the end; None without losses."""
        return float(self.smooth[-1]) if len(self.smooth) else None

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the smoothed minimum; None without losses that are finite."""
        if not np.isfinite(self.smooth).any():
            return None
        i = int(np.argmin(self.smooth))
        return int(self.steps[i]), float(self.smooth[i])

    @property
    def scatter(self) -> float:
        """Standard deviation of the losses around the smoothed one, from their median distance."""
        finite = np.isfinite(self.losses) & np.isfinite(self.smooth)
        if not finite.any():
            return 0.0
        return float(np.median(np.abs(self.losses[finite] - self.smooth[finite]))) / 0.6745

    @property
    def noise(self) -> float:
        """Standard deviation of the smoothed loss: that of a median over Gaussian noise that persists as this one does."""
        with np.errstate(invalid="ignore"):
            lasting = measure_persistence(self.losses - self.smooth)
        return float(np.sqrt(np.pi / 2) * self.scatter * lasting / np.sqrt(2 * self.half + 1))

    @property
    def has_enough(self) -> bool:
        """Whether there are enough losses to tell whether they diverge."""
        return len(self.losses) > 2 * self.half

    @property
    def lost_at(self) -> int | None:
        """First step from which no loss is a number any longer, for two or more; None: the last two are not all lost."""
        lost = ~np.isfinite(self.losses)
        if len(lost) < 2 or not lost[-2:].all():
            return None
        numbers = np.flatnonzero(~lost)
        return int(self.steps[numbers[-1] + 1 if len(numbers) else 0])

    @cached_property
    def scale_to_lowest(self) -> Scale | None:
        """What 100% of a rise above the smoothed minimum are: how far it rises later does not count; None: the minimum."""
        return measure_scale(self.losses[: int(np.argmin(self.smooth)) + self.half + 1]) if len(self.smooth) else None

    def _whole(self, floor: float) -> float:
        return Scale.choose(self.scale_to_lowest, floor)

    def _least_rise(self, floor: float) -> float:
        # The minimum of a noisy curve lies below it by chance, by 3 to 4 standard deviations.
        return max(thresholds.MAX_GAP / 100 * self._whole(floor), 2 * thresholds.DEPARTS_SIGMAS * self.noise)

    @property
    def visible_rise(self) -> float:
        """The smallest rise above the smoothed minimum that counts, in percent; NaN without losses."""
        floor = float(self.smooth.min()) if len(self.smooth) else 0.0
        return 100 * self._least_rise(floor) / whole if (whole := self._whole(floor)) else float("nan")

    @cached_property
    def stepped_up(self) -> tuple[int, float] | None:
        """The step at which the loss goes up to another level, and by how many percent; None: at none.

        The median of a twelfth of the losses before is compared with that of as many after it, and of as many again later:
        a spike comes back, and a loss that learns goes down.
        """
        before, after = self._levels()
        if not len(before):
            return None
        noise = np.sqrt(2) * self.noise * np.sqrt((2 * self.half + 1) / self.half)
        with np.errstate(invalid="ignore"):  # where neither is a number
            rise = after - before
        at = int(np.argmax(np.where(np.isfinite(rise), rise, -np.inf)))
        step = int(self.steps[at + self.half])
        whole = Scale.choose(self.scale_before(step), float(before[at]))
        if not rise[at] > max(thresholds.LEVEL_SIGMAS * noise, thresholds.LEVEL_PART * whole):
            return None
        return step, 100 * float(rise[at]) / whole

    def _levels(self) -> tuple[Floats, Floats]:
        """[N]: medians of `half` losses before a place; and of the `half` after it or the next ones, whichever is lower."""
        medians = pl.Series(self.losses).rolling_median(self.half).to_numpy()[self.half - 1 :]
        later = medians[self.half :]
        return medians[: len(later)], np.minimum(later, _shifted(later, self.half))

    @property
    def diverged_at(self) -> int | None:
        """First step from which the smoothed loss stays above its own minimum for good; None: it does not."""
        if not len(self.smooth):
            return None
        lowest = int(np.argmin(self.smooth))
        floor = float(self.smooth[lowest])
        high = self.smooth > floor + self._least_rise(floor)
        with np.errstate(invalid="ignore"):
            first = find_lasting_start(high, self.losses - floor, self.half, after=lowest)
        return None if first is None else int(self.steps[first])


def _shifted(values: Floats, by: int) -> Floats:
    """What comes `by` places later; at the end the last of all."""
    later: Floats = values[np.minimum(np.arange(len(values)) + by, len(values) - 1)]
    return later
