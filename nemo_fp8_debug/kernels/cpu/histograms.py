"""Compute the metrics of histograms in host memory, in one loop. The results are bitwise those of `numerics/metrics.py`.

The torch operations in `numerics/metrics.py` read all bins about sixty times and take ten times as long as this loop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...numerics import metrics
from ...numerics.formats import FloatFormat
from ...numerics.histogram import BINS, DTYPES, LANES, Histogram, HistogramBatch, find_infinity_bin, list_pattern_magnitudes
from ...numerics.metrics import QuantizationSums, ValueMoments
from .histogram import list_occupied_bins
from .jit import jit
from .quantize import compute_rounding_constants, round_to_format

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FP8_BITS = 8


class Histograms:
    """A list of S histograms, and their metrics. Do not count values into these histograms afterwards."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = histograms
        _find_occupied(histograms)

    def select(self, rows: Sequence[int]) -> Histograms:
        """Return the histograms with these indices, in this order."""
        return self if len(rows) == len(self._histograms) else Histograms([self._histograms[i] for i in rows])

    @functools.cached_property
    def value_moments(self) -> ValueMoments:
        """The moments of all histograms, as S rows."""
        integers, floats = np.empty((3, len(self._histograms)), np.int64), np.empty((5, len(self._histograms)))
        if self._histograms:
            _moments(*self._packed, integers, floats)
        return ValueMoments(*torch.from_numpy(integers).unbind(), *torch.from_numpy(floats).unbind())

    def amax(self) -> torch.Tensor:
        """Return the largest finite magnitudes, float32 [S], as `HistogramBatch.amax` does."""
        return self.value_moments.amax.float()

    def quantization_sums(self, scale: torch.Tensor, formats: Sequence[FloatFormat]) -> QuantizationSums:
        """Return the quantization sums as S rows. Each histogram has its own scale (`scale` is float32 [S]) and format."""
        if any(fmt.bits != _FP8_BITS for fmt in formats):
            return metrics.quantization_sums_of_histograms(HistogramBatch.pack_histograms(self._histograms), scale, formats)
        integers, floats = np.empty((2, len(formats)), np.int64), np.empty((3, len(formats)))
        if formats:
            numbers = np.array([compute_rounding_constants(fmt) for fmt in formats], np.float32)
            _sums(*self._packed, scale.numpy(), numbers, integers, floats)
        return QuantizationSums(*torch.from_numpy(integers).unbind(), *torch.from_numpy(floats).unbind())

    @functools.cached_property
    def _packed(self) -> tuple[npt.NDArray[np.float32], Integers, Integers, Integers, Integers, Integers]:
        """Arguments of the compiled loops: magnitudes, and the occupied bins and counts of all histograms, end to end."""
        bins, counts = (np.concatenate(of) for of in zip(*(h.occupied_bins for h in self._histograms), strict=True))
        ends = np.cumsum([0, *(len(h.occupied_bins[0]) for h in self._histograms)])
        infinity = np.array([find_infinity_bin(h.dtype) for h in self._histograms])
        table = np.array([BINS * DTYPES.index(h.dtype) for h in self._histograms])
        return list_pattern_magnitudes().numpy(), bins, counts, ends, infinity, table


def _find_occupied(histograms: Sequence[Histogram]) -> None:
    """Fill in `Histogram.occupied_bins`, in a fifth of the time that the property takes."""
    bins, counts = np.empty(BINS, np.int64), np.empty(BINS, np.int64)
    for histogram in histograms:
        if "occupied" not in vars(histogram):
            n = list_occupied_bins(histogram.counts.data_ptr(), bins, counts)
            histogram.occupied_bins = bins[:n].copy(), counts[:n].copy()


@jit
def _total(values: Floats, n: int) -> float:
    """Return the sum of `n` values in the order of `HistogramBatch.sum_bins`.

    The function overwrites `values`, which must have room for padding after the first `n` values.
    """
    lanes = (n + LANES - 1) // LANES
    values[n : lanes * LANES] = 0
    for g in range(lanes):
        half = LANES // 2
        while half:
            for i in range(g * LANES, g * LANES + half):
                values[i] += values[i + half]
            half //= 2
        values[g] = values[g * LANES]
    while lanes > 1:
        if lanes % 2:
            values[lanes] = 0
        lanes = (lanes + 1) // 2
        for i in range(lanes):
            values[i] = values[2 * i] + values[2 * i + 1]
    return values[0] if n else 0.0


@jit
def _finite(bins: Integers, first: int, end: int, infinity: int) -> int:
    """Return the index after the last finite bin."""
    while end > first and bins[end - 1] >= infinity:
        end -= 1
    return end


@jit
def _moments(  # type: ignore[no-untyped-def]
    magnitude, bins, counts, ends, infinity, table, integers, floats
):
    x2, x4 = np.empty(BINS), np.empty(BINS)
    for s in range(table.size):
        first, end = ends[s], _finite(bins, ends[s], ends[s + 1], infinity[s])
        n = zeros = nan = inf = 0
        for i in range(first, end):
            n += counts[i]
            square = np.float64(magnitude[table[s] + bins[i]]) * np.float64(magnitude[table[s] + bins[i]])
            x2[i - first] = np.float64(counts[i]) * square
            x4[i - first] = square * square * np.float64(counts[i])
        for i in range(end, ends[s + 1]):
            if bins[i] == infinity[s]:
                inf += counts[i]
            else:
                nan += counts[i]
        if end > first and bins[first] == 0:
            zeros = counts[first]
        amin = median = np.nan
        if n > zeros:
            seen, middle, i = zeros, zeros + (n - zeros + 1) // 2, first + (zeros > 0)
            amin = np.float64(magnitude[table[s] + bins[i]])  # type: ignore[assignment]
            while seen + counts[i] < middle:
                seen += counts[i]
                i += 1
            median = np.float64(magnitude[table[s] + bins[i]])  # type: ignore[assignment]
        amax = np.float64(magnitude[table[s] + bins[end - 1]]) if end > first else 0.0
        integers[0, s], integers[1, s], integers[2, s] = n, nan, inf
        floats[0, s], floats[1, s], floats[2, s] = amax, amin, median
        floats[3, s], floats[4, s] = _total(x2, end - first), _total(x4, end - first)


@jit
def _sums(  # type: ignore[no-untyped-def]
    magnitude, bins, counts, ends, infinity, table, scale, numbers, integers, floats
):
    error2, xq, q2 = np.empty(BINS), np.empty(BINS), np.empty(BINS)
    for s in range(table.size):
        first, end = ends[s], _finite(bins, ends[s], ends[s + 1], infinity[s])
        limit, beyond, lowest, anchor = numbers[s, 0], numbers[s, 1], numbers[s, 2], numbers[s, 3]
        by, underflows, overflows = scale[s], 0, 0
        for i in range(first, end):
            value = magnitude[table[s] + bins[i]]
            scaled = value * by
            q = np.float64(round_to_format(min(scaled, limit), lowest, anchor)) / np.float64(by)
            underflows += counts[i] * ((q == 0) & (value != 0))
            overflows += counts[i] * ((scaled > beyond) & (q != 0))
            x, weighted = np.float64(value), np.float64(counts[i]) * q
            error = x - q
            error2[i - first] = error * error * np.float64(counts[i])
            xq[i - first] = x * weighted
            q2[i - first] = weighted * q
        integers[0, s], integers[1, s] = underflows, overflows
        floats[0, s], floats[1, s] = _total(error2, end - first), _total(xq, end - first)
        floats[2, s] = _total(q2, end - first)
