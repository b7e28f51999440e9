"""The median of a column, however many rows it has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from .metrics import Metrics

#: values that are sorted at once, and into how many ranges others are counted
_AT_ONCE, _RANGES = 1 << 21, 16
_SIGN = np.uint64(1 << 63)


def median_of(metrics: Metrics, column: str, at_once: int = _AT_ONCE) -> float:
    """The median of all values of a column, without NaN; NaN if there are none.

    Values are counted by range, and those of the range that has the median are read again, until few are left.

    Args:
        at_once: values that are sorted.

    Example:
        >>> rows = pl.DataFrame({"step": [0, 1, 2, 3], "layer": "fc1", "role": "input", "mse": [4.0, 1.0, 2.0, None]})
        >>> median_of(Metrics.of(rows), "mse")
        2.0
    """
    total = sum(map(len, _keys(metrics, column)))
    if not total:
        return float("nan")
    keys = [_nth(metrics, column, rank, total, at_once) for rank in sorted({(total - 1) // 2, total // 2})]
    return float(_values(np.array(keys, dtype=np.uint64)).mean())


def _nth(metrics: Metrics, column: str, rank: int, inside: int, at_once: int) -> int:
    """The key that so many are below.

    Args:
        inside: how many there are.
    """
    low, high = 0, (1 << 64) - 1
    while inside > at_once:
        shift = max((high - low).bit_length() - _RANGES, 0)
        counts = np.zeros(((high - low) >> shift) + 1, dtype=np.int64)
        for keys in _between(metrics, column, low, high):
            counts += np.bincount(((keys - np.uint64(low)) >> np.uint64(shift)).astype(np.int64), minlength=len(counts))
        ends = np.cumsum(counts)
        at = int(np.searchsorted(ends, rank, side="right"))
        rank, inside = rank - int(ends[at] - counts[at]), int(counts[at])
        low, high = low + (at << shift), min(low + ((at + 1) << shift) - 1, high)
        if low == high:
            return low
    return int(np.partition(np.concatenate(list(_between(metrics, column, low, high))), rank)[rank])


def _between(metrics: Metrics, column: str, low: int, high: int) -> Iterator[npt.NDArray[np.uint64]]:
    for keys in _keys(metrics, column):
        yield keys[(keys >= low) & (keys <= high)]


def _keys(metrics: Metrics, column: str) -> Iterator[npt.NDArray[np.uint64]]:
    """Integers in the order of the values."""
    for rows in metrics.scan([column]):
        values = rows[column].cast(pl.Float64).to_numpy()
        bits = values[~np.isnan(values)].view(np.uint64)
        yield np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).view(np.float64)
