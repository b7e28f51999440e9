"""Running medians of a series, and the standard error of a mean whose values depend on one another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.fft import dct

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


def persistence(noise: Floats) -> float:
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
