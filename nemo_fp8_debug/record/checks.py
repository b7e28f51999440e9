"""What no row of a record can have: a part with such rows was not written by this package, or not as it is now."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: columns that tell rows apart
_NAMES = ("attempt", "step", "layer", "role", "product", "what", "name")
#: least and greatest values, which rounding may pass by a little
_WITHIN = {"underflow_pct": (0.0, 100.0), "overflow_pct": (0.0, 100.0), "cosine": (-1.0, 1.0), "amax": (0.0, np.inf)}
_ROUNDING = 1e-6
#: characters of a name that a message shows
_SHOWN = 40
#: magnitudes that 16 bits have beside the sign, and what histograms can be of and under
MAGNITUDES = 1 << 15
HISTOGRAMS = {"dtype": ("bfloat16", "float16"), "format": ("e4m3", "e5m2", "e2m1", "bf16", "fp16")}


def wrong_values(rows: pa.Table) -> str | None:
    """What is wrong with values of a part, in words; None: nothing.

    Args:
        rows: some of its columns, text perhaps as dictionaries.

    Example:
        >>> import pyarrow as pa
        >>> wrong_values(pa.table({"step": [0, -3], "layer": ["fc1", "fc1"]}))
        'step is negative'
    """
    for name in rows.column_names:
        if said := _wrong_column(name, rows[name]):
            return f"{name} {said}"
    if {"bins", "counts"} <= set(rows.column_names):
        return _wrong_kind(rows) or _wrong_histograms(rows["bins"].combine_chunks(), rows["counts"].combine_chunks())
    return None


def _wrong_column(name: str, column: pa.ChunkedArray) -> str | None:
    if name in _NAMES and column.null_count:
        return "is missing in some rows"
    if pa.types.is_integer(column.type):
        least = pc.min(column).as_py()
        return "is negative" if least is not None and least < 0 else None
    if name in _WITHIN:
        low, high = _WITHIN[name]
        if not (_are_within(column, low, high) or _are_within(column.filter(pc.is_finite(column)), low, high)):
            return f"is not between {low:g} and {high:g}"
    return None


def _are_within(values: pa.ChunkedArray, low: float, high: float) -> bool:
    extremes = pc.min_max(values)
    least, most = extremes["min"].as_py(), extremes["max"].as_py()
    return least is None or low - _ROUNDING <= least <= most <= high + _ROUNDING


def _wrong_kind(rows: pa.Table) -> str | None:
    for name, known in HISTOGRAMS.items():
        if name in rows.column_names and (unknown := set(pc.unique(rows[name]).to_pylist()) - set(known)):
            return f"{name} is {str(min(unknown, key=str))[:_SHOWN]!r}; it can be {', '.join(known)}"
    return None


def _wrong_histograms(bins: pa.ListArray, counts: pa.ListArray) -> str | None:
    lengths = pc.list_value_length(bins)
    if bins.null_count or counts.null_count or not lengths.equals(pc.list_value_length(counts)):
        return "bins and counts are not of one length"
    places, numbers = bins.flatten(), counts.flatten()
    if places.null_count or numbers.null_count:
        return "bins or counts lack values"
    if not len(places):
        return None
    at = places.to_numpy().astype(np.int64)
    if at.max() >= MAGNITUDES:
        return f"bins reach {at.max()}; there are {MAGNITUDES}"
    if not np.isin(np.flatnonzero(np.diff(at) <= 0) + 1, np.cumsum(lengths.to_numpy())).all():
        return "bins do not ascend"
    return "counts is negative" if pc.min(numbers).as_py() < 0 else None
