"""Where values lie: the ends, and how many there are of each size; of parts and of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .layouts import Array

#: bits of a float32 that are dropped: what is left is BF16; and of that, so that a picture has few bars
_DROPPED, _COARSER = 16, 4
_MOST = float(np.finfo(np.float32).max) / 2


@dataclass(frozen=True)
class Extent:
    """Finite values: the ends, and how many there are of each value rounded to BF16."""

    low: float
    high: float
    #: the least above 0
    positive: float
    #: ascending
    values: Array
    counts: Array

    @classmethod
    def of(cls, values: Array) -> Extent:
        """Of any values; those that are not finite are left out."""
        found = values[np.isfinite(values)]
        low, high = float(found.min(initial=np.inf)), float(found.max(initial=-np.inf))
        positive = float(found[found > 0].min(initial=np.inf))
        bits = np.clip(found, -_MOST, _MOST).astype(np.float32).view(np.uint32)
        nearest = (bits + np.uint32(1 << (_DROPPED - 1))) >> _DROPPED
        counts = np.bincount(nearest)
        codes = np.flatnonzero(counts)
        return cls(low, high, positive, *_ascending(_floats(codes), counts[codes]))

    @property
    def nbytes(self) -> int:
        """That it takes."""
        return int(self.values.nbytes + self.counts.nbytes)

    def quantile(self, percent: float) -> float | None:
        """To 0.4% of its value; None where there is no value."""
        if not len(self.values):
            return None
        upto = np.cumsum(self.counts)
        value = self.values[np.searchsorted(upto, percent / 100 * upto[-1])]
        return float(np.clip(value, self.low, self.high))


def merged(extents: Sequence[Extent]) -> Extent:
    """Of the values of all."""
    if not extents:
        return Extent.of(np.empty(0))
    values, place = np.unique(np.concatenate([e.values for e in extents]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([e.counts for e in extents]), len(values)).astype(np.int64)
    lows, highs, positives = zip(*((e.low, e.high, e.positive) for e in extents), strict=True)
    return Extent(min(lows), max(highs), min(positives), values, counts)


def coarser(extent: Extent) -> tuple[Array, Array]:
    """Values with 4 significant bits, ascending, and how many there are of each."""
    bits = extent.values.astype(np.float32).view(np.uint32) >> (_DROPPED + _COARSER)
    codes, place = np.unique(bits, return_inverse=True)
    counts = np.bincount(place, extent.counts, len(codes)).astype(np.int64)
    return _ascending(_floats(codes << _COARSER), counts)


def _floats(codes: Array) -> Array:
    """From the upper halves of their bits; -0 is 0."""
    found: Array = (codes.astype(np.uint32) << _DROPPED).view(np.float32).astype(np.float64) + 0.0
    return found


def _ascending(values: Array, counts: Array) -> tuple[Array, Array]:
    order = np.argsort(values, kind="stable")
    return values[order], counts[order]
