"""By how much a metric of each tensor of a baseline must change to count: what `compare` goes by, for all tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ...analysis.comparison.onset import EVIDENCE, Evidence, least_of_values, least_rise, running_median
from ...core.threads import ahead
from ...record.schema import Part
from ...record.storage import Storage
from .execution import tensors_of
from .layouts import Array, Layout, Tensors
from .part_matrices import Index, Parts
from .tables import layout_of, metric_of, packed, placed

#: least changes that count of metrics by which `compare` finds no tensor out of band: as much as half again of an error
_HALF_AGAIN = 0.585
_LEAST = {"sqnr_db": 10 * np.log10(1.5), "cosine": 0.01, "dynamic_range_log2": 3.0, "sink_pct": 1.0, "dropped_pct": 1.0}
#: values that are held at a time, half a GiB, and tensors whose medians are taken at once
_CELLS, _BLOCK = 1 << 27, 128


def spread(parts: Parts, run: Storage, metric: str) -> bytes:
    """By how much a metric must rise and fall to count, against this run.

    Returns:
        A header (log2: whether of its logarithm; floor: what is less is rounding there; least: the rise that counts however
        steady the run is; layer, role, kind, depth), and float32 [2, tensors]: rises and falls.
    """

    def read(index: Index) -> bytes:
        rise, fall = _evidence_of(metric)
        layouts = {part: layout for part in index.held if (layout := layout_of(parts, run, part))}
        tensors = tensors_of(layouts)
        at_once = max(_BLOCK, _CELLS // max(1, len(index.steps)))
        least = np.empty((2, len(tensors)), "<f4")
        for first in range(0, len(tensors), at_once):
            some = slice(first, first + at_once)
            values = _values(parts, run, index, layouts, metric, tensors[some])
            least[:, some] = np.concatenate(list(ahead(partial(_least, values, rise, fall), _blocks(values))), axis=1)
        if rise.least_values:
            least[0] = np.maximum(least[0], least_of_values(rise, _sizes(parts, run, index, tensors)))
        if not fall:
            least[1] = least[0]
        header = {"log2": rise.log2, "floor": rise.floor if rise.log2 else 0.0, "least": rise.least}
        return packed({**header, **placed(tensors)}, least)

    return parts.settled(run, read)


def _blocks(values: Array) -> list[slice]:
    return [slice(first, first + _BLOCK) for first in range(0, values.shape[1], _BLOCK)]


def _least(values: Array, rise: Evidence, fall: Evidence | None, some: slice) -> Array:
    """[2, tensors]: the least rise and fall of some."""
    block = np.ascontiguousarray(values[:, some].T)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        medians = running_median(block)
        return np.stack([least_rise(evidence, block, medians) for evidence in (rise, fall or rise)])


def _evidence_of(metric: str) -> tuple[Evidence, Evidence | None]:
    """By which a rise counts and a fall; None: a fall as a rise does."""
    known = [evidence for evidence in EVIDENCE if evidence.metric == metric]
    if known:
        return next(e for e in known if e.sign > 0), next((e for e in known if e.sign < 0), None)
    if metric in _LEAST:
        return Evidence(metric, _LEAST[metric]), None
    return Evidence(metric, _HALF_AGAIN, log2=True, floor=float(np.finfo(np.float64).tiny)), None


def _values(
    parts: Parts,
    run: Storage,
    index: Index,
    layouts: Mapping[Part, Layout],
    metric: str,
    tensors: Sequence[tuple[str, str]],
) -> Array:
    """The metric of some tensors at all sampled steps, float32 [S, T]: as exact as the answer, in half the time."""
    place = {key: i for i, key in enumerate(tensors)}
    # Of each set of tensors that parts have: which are among these, and where.
    of_sets = {}
    for some in {layout.tensors for layout in layouts.values()}:
        there = [(i, place[key]) for i, key in enumerate(some) if key in place]
        of_sets[some] = np.array(there, np.int64).reshape(-1, 2).T
    values = np.full((len(index.steps), len(tensors)), np.nan, np.float32)

    def fill(part: Part) -> None:
        layout, mine = layouts[part], index.held[part]
        columns, here = of_sets[layout.tensors]
        found = metric_of(parts, run, part, layout, metric)[np.searchsorted(layout.steps, mine)]
        values[np.ix_(np.searchsorted(index.steps, mine), here)] = found[:, columns]

    deque(ahead(fill, list(layouts)), 0)
    return values


def _sizes(parts: Parts, run: Storage, index: Index, tensors: Tensors) -> Array:
    """[T]: values of each tensor in the newest part; infinite where that is not known."""
    sizes = dict.fromkeys(tensors, np.inf)
    for part in index.newest_first[:1]:
        if layout := layout_of(parts, run, part):
            with np.errstate(invalid="ignore"):
                most = np.fmax.reduce(metric_of(parts, run, part, layout, "n"), axis=0)
            sizes |= {key: n for key, n in zip(layout.tensors, most.tolist(), strict=True) if n > 0}
    return np.array([sizes[key] for key in tensors])
