"""Compute the color scales of a map from the distribution of a metric's values and the least changes that count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...analysis.comparison.onset import (
    EVIDENCE,
    OnsetCriterion,
    compute_least_rise_for_size,
    compute_least_rise_from_baseline,
    compute_running_median,
)
from ...analysis.formatting import make_jsonable
from ...core.threads import map_in_threads
from ...record.schema import Part
from ...record.storage import FolderStorage
from ..cache import LRUCache
from .heatmap import find_warm_up_end, make_tensor_columns, pack_header_and_array
from .metadata import list_tensors
from .part_matrices import (
    Array,
    CachedPartReader,
    RowLayout,
    SampledStepIndex,
    TensorKeys,
    compute_metric_values,
    convert_to_float_array,
    list_columns_of_metric,
    mark_what_if_rows,
)

#: number of bits to drop from float32 to get BF16, and number of further bits to drop for the few bars of a histogram
_DROPPED, _COARSER = 16, 4
_MOST = float(np.finfo(np.float32).max) / 2


@dataclass(frozen=True)
class MetricRange:
    """The range of finite values, and the count of each value rounded to BF16."""

    low: float
    high: float
    #: the smallest value above 0
    positive: float
    #: rounded values, ascending
    values: Array
    counts: Array

    @classmethod
    def measure_extent(cls, values: Array) -> MetricRange:
        """Return the range and the counts of the finite values."""
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
        """Return the size in bytes."""
        return int(self.values.nbytes + self.counts.nbytes)

    def compute_quantile(self, percent: float) -> float | None:
        """Return a quantile with a relative error of at most 0.4%, or None without values."""
        if not len(self.values):
            return None
        upto = np.cumsum(self.counts)
        value = self.values[np.searchsorted(upto, percent / 100 * upto[-1])]
        return float(np.clip(value, self.low, self.high))


def merge_extents(extents: Sequence[MetricRange]) -> MetricRange:
    """Merge several ranges into one that covers all their values, and add up the counts."""
    if not extents:
        return MetricRange.measure_extent(np.empty(0))
    values, place = np.unique(np.concatenate([e.values for e in extents]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([e.counts for e in extents]), len(values)).astype(np.int64)
    lows, highs, positives = zip(*((e.low, e.high, e.positive) for e in extents), strict=True)
    return MetricRange(min(lows), max(highs), min(positives), values, counts)


def coarsen_extent(extent: MetricRange) -> tuple[Array, Array]:
    """Return the values rounded to 4 significant bits, ascending, and their counts."""
    bits = extent.values.astype(np.float32).view(np.uint32) >> (_DROPPED + _COARSER)
    codes, place = np.unique(bits, return_inverse=True)
    counts = np.bincount(place, extent.counts, len(codes)).astype(np.int64)
    return _ascending(_floats(codes << _COARSER), counts)


def _floats(codes: Array) -> Array:
    """Convert upper halves of float32 bits to values, with 0 for -0."""
    found: Array = (codes.astype(np.uint32) << _DROPPED).view(np.float32).astype(np.float64) + 0.0
    return found


def _ascending(values: Array, counts: Array) -> tuple[Array, Array]:
    order = np.argsort(values, kind="stable")
    return values[order], counts[order]


#: percentiles of robust limits
PERCENTILES = (1.0, 50.0, 99.0)


#: maximum size in bytes of the cache of ranges and their counts
_EXTENTS = 32 << 20


class MetricRangeCache:
    """Cached ranges and counts of metrics, by part."""

    def __init__(self, parts: CachedPartReader) -> None:
        self._parts = parts
        self._known: LRUCache[MetricRange] = LRUCache(_EXTENTS, lambda extent: extent.nbytes)

    def describe_metric_range(self, run: FolderStorage, metric: str) -> dict[str, Any]:
        """Describe the values of a metric over all readable sampled steps.

        Returns:
            low, high and positive (the smallest value above 0) of all finite values, and warm_up (the last step of the first
            tenth of the samples, None if there is one sample). For the samples after the warm-up: percentiles (1, 50 and
            99), values (rounded to 4 significant bits, ascending), and counts.
        """

        def read(index: SampledStepIndex) -> dict[str, Any]:
            warm_up = find_warm_up_end(index)
            until = -1 if warm_up is None else warm_up
            early = self._of_parts(run, index, metric, lambda step: step <= until)
            late = self._of_parts(run, index, metric, lambda step: step > until)
            whole, later = merge_extents([*early, *late]), merge_extents(late or early)
            values, counts = coarsen_extent(later)
            return make_jsonable(  # type: ignore[no-any-return]
                {
                    "low": whole.low,
                    "high": whole.high,
                    "positive": whole.positive,
                    "warm_up": warm_up,
                    "percentiles": [later.compute_quantile(percent) for percent in PERCENTILES],
                    "values": values.tolist(),
                    "counts": counts.tolist(),
                }
            )

        return self._parts.read_with_retry(run, read)

    def _of_parts(
        self, run: FolderStorage, index: SampledStepIndex, metric: str, wanted: Callable[[int], bool]
    ) -> list[MetricRange]:
        """Return the range and counts of each part over its wanted steps."""
        found = []
        for part, steps in index.steps_by_part.items():
            if kept := [step for step in steps if wanted(step)]:
                read = partial(self._of_part, run, part, metric, kept)
                found.append(self._parts.read_unless_damaged(run, part, metric, read))
        return [extent for extent in found if extent is not None]

    def _of_part(self, run: FolderStorage, part: Part, name: str, steps: Sequence[int]) -> MetricRange:
        parts = self._parts

        def make() -> MetricRange:
            whole = len(steps) == len(parts.read_outline(run, part).steps)
            is_mixed = parts.table != "metrics"
            others = [*(() if whole else ("step",)), *(("scale_source",) if is_mixed else ())]
            rows = parts.read_columns(run, part, *list_columns_of_metric(parts.table, name), *others)
            values = compute_metric_values(rows, parts.table, name)
            values = np.where(mark_what_if_rows(rows), np.nan, values) if is_mixed else values
            return MetricRange.measure_extent(
                values if whole else values[np.isin(convert_to_float_array(rows["step"]), steps)]
            )

        return self._known.get_or_make((str(run), part.path, name, tuple(steps)), make)


#: least changes that count for metrics that `compare` does not use; 0.585 bits mean that an error grew by half
_HALF_AGAIN = 0.585
_LEAST = {"sqnr_db": 10 * np.log10(1.5), "cosine": 0.01, "dynamic_range_log2": 3.0, "sink_pct": 1.0, "dropped_pct": 1.0}
#: largest number of values in memory (half a GiB), and number of tensors in one batch of medians
_CELLS, _BLOCK = 1 << 27, 128


def pack_rise_thresholds(parts: CachedPartReader, run: FolderStorage, metric: str) -> bytes:
    """Return how much a metric must rise or fall to count, for each tensor of this run.

    Returns:
        A header, and the least rises and falls, float32 [2, tensors]. The header has log2 (whether changes are in log2
        units), floor (smaller values count as this value), least (the smallest rise that counts in any run), layer, role,
        kind and depth.
    """

    def read(index: SampledStepIndex) -> bytes:
        rise, fall = _evidence_of(metric)
        layouts = {part: layout for part in index.steps_by_part if (layout := parts.read_layout_unless_damaged(run, part))}
        tensors = list_tensors(layouts)
        at_once = max(_BLOCK, _CELLS // max(1, len(index.steps)))
        least = np.empty((2, len(tensors)), "<f4")
        for first in range(0, len(tensors), at_once):
            some = slice(first, first + at_once)
            values = _values(parts, run, index, layouts, metric, tensors[some])
            blocks = [slice(begin, begin + _BLOCK) for begin in range(0, values.shape[1], _BLOCK)]
            least[:, some] = np.concatenate(list(map_in_threads(partial(_least, values, rise, fall), blocks)), axis=1)
        if rise.least_values:
            least[0] = np.maximum(least[0], compute_least_rise_for_size(rise, _sizes(parts, run, index, tensors)))
        if not fall:
            least[1] = least[0]
        header = {"log2": rise.log2, "floor": rise.floor if rise.log2 else 0.0, "least": rise.least}
        return pack_header_and_array({**header, **make_tensor_columns(tensors)}, least)

    return parts.read_with_retry(run, read)


def _least(values: Array, rise: OnsetCriterion, fall: OnsetCriterion | None, some: slice) -> Array:
    """Return the least rise and the least fall that count for some tensors, [2, tensors]."""
    block = np.ascontiguousarray(values[:, some].T)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        medians = compute_running_median(block)
        return np.stack([compute_least_rise_from_baseline(evidence, block, medians) for evidence in (rise, fall or rise)])


def _evidence_of(metric: str) -> tuple[OnsetCriterion, OnsetCriterion | None]:
    """Return the evidence for rises, and the evidence for falls (None if falls count like rises)."""
    known = [evidence for evidence in EVIDENCE if evidence.metric == metric]
    if known:
        return next(e for e in known if e.sign > 0), next((e for e in known if e.sign < 0), None)
    if metric in _LEAST:
        return OnsetCriterion(metric, _LEAST[metric]), None
    return OnsetCriterion(metric, _HALF_AGAIN, log2=True, floor=float(np.finfo(np.float64).tiny)), None


def _values(
    parts: CachedPartReader,
    run: FolderStorage,
    index: SampledStepIndex,
    layouts: Mapping[Part, RowLayout],
    metric: str,
    tensors: Sequence[tuple[str, str]],
) -> Array:
    """Return a metric of some tensors at all sampled steps, float32 [S, T]."""
    place = {key: i for i, key in enumerate(tensors)}
    # For each set of tensors in parts: the indices of wanted tensors in the set and in `tensors`.
    of_sets = {}
    for some in {layout.tensors for layout in layouts.values()}:
        there = [(i, place[key]) for i, key in enumerate(some) if key in place]
        of_sets[some] = np.array(there, np.int64).reshape(-1, 2).T
    values = np.full((len(index.steps), len(tensors)), np.nan, np.float32)

    def fill(part: Part) -> None:
        layout, mine = layouts[part], index.steps_by_part[part]
        columns, here = of_sets[layout.tensors]
        found = parts.read_metric_or_nan(run, part, layout, metric)[np.searchsorted(layout.steps, mine)]
        values[np.ix_(np.searchsorted(index.steps, mine), here)] = found[:, columns]

    deque(map_in_threads(fill, list(layouts)), 0)
    return values


def _sizes(parts: CachedPartReader, run: FolderStorage, index: SampledStepIndex, tensors: TensorKeys) -> Array:
    """Return the number of values of each tensor in the newest part, [T], infinite if unknown."""
    sizes = dict.fromkeys(tensors, np.inf)
    for part in index.newest_parts_first[:1]:
        if layout := parts.read_layout_unless_damaged(run, part):
            with np.errstate(invalid="ignore"):
                most = np.fmax.reduce(parts.read_metric_or_nan(run, part, layout, "n"), axis=0)
            sizes |= {key: n for key, n in zip(layout.tensors, most.tolist(), strict=True) if n > 0}
    return np.array([sizes[key] for key in tensors])
