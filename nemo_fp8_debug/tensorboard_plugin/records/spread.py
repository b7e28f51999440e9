"""By how much a metric of each tensor of a baseline must change to count: what `compare` goes by, for all tensors."""

from __future__ import annotations

import numpy as np

from ...analysis.comparison.evidence import EVIDENCE, Evidence
from ...analysis.comparison.onset import least_of_values, least_rise, running_median
from ...record.storage import Storage
from .execution import tensors_of
from .part_index import Array
from .part_matrices import Index, Parts
from .tables import layout_of, metric_of, packed, placed

#: least changes that count of metrics by which `compare` finds no tensor out of band: as much as half again of an error
_HALF_AGAIN = 0.585
_LEAST = {"sqnr_db": 10 * np.log10(1.5), "cosine": 0.01, "dynamic_range_log2": 3.0, "sink_pct": 1.0, "dropped_pct": 1.0}
#: tensors whose medians are taken at once
_BLOCK = 128


def spread(parts: Parts, run: Storage, metric: str) -> bytes:
    """By how much a metric must rise and fall to count, against this run.

    Returns:
        A header (log2: whether of its logarithm; floor: what is less is rounding there; least: the rise that counts however
        steady the run is; layer, role, kind, depth), and float32 [2, tensors]: rises and falls.
    """

    def read(index: Index) -> bytes:
        rise, fall = _evidence_of(metric)
        tensors, values = _whole(parts, run, index, metric)
        sizes = _sizes(parts, run, index, tensors) if rise.least_values else np.ones(len(tensors))
        least = np.empty((2, len(tensors)), "<f4")
        for first in range(0, len(tensors), _BLOCK):
            block = np.ascontiguousarray(values[:, first : first + _BLOCK].T)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                medians = running_median(block)
                for i, evidence in enumerate((rise, fall) if fall else (rise,)):
                    least[i, first : first + _BLOCK] = least_rise(evidence, block, medians)
        if rise.least_values:
            least[0] = np.maximum(least[0], least_of_values(rise, sizes))
        if not fall:
            least[1] = least[0]
        header = {"log2": rise.log2, "floor": rise.floor if rise.log2 else 0.0, "least": rise.least}
        return packed({**header, **placed(tensors)}, least)

    return parts.settled(run, read)


def _evidence_of(metric: str) -> tuple[Evidence, Evidence | None]:
    """By which a rise counts and a fall; None: a fall as a rise does."""
    known = [evidence for evidence in EVIDENCE if evidence.metric == metric]
    if known:
        return next(e for e in known if e.sign > 0), next((e for e in known if e.sign < 0), None)
    if metric in _LEAST:
        return Evidence(metric, _LEAST[metric]), None
    return Evidence(metric, _HALF_AGAIN, log2=True, floor=float(np.finfo(np.float64).tiny)), None


def _whole(parts: Parts, run: Storage, index: Index, metric: str) -> tuple[tuple[tuple[str, str], ...], Array]:
    """Tensors, and the metric of all at all sampled steps, float32 [S, T]: as exact as the answer, in half the time."""
    layouts = {part: layout for part in index.held if (layout := layout_of(parts, run, part))}
    tensors = tensors_of(layouts)
    place = {key: i for i, key in enumerate(tensors)}
    values = np.full((len(index.steps), len(tensors)), np.nan, np.float32)
    for part, layout in layouts.items():
        mine = index.held[part]
        columns = np.array([place[key] for key in layout.tensors])
        found = metric_of(parts, run, part, layout, metric)[np.searchsorted(layout.steps, mine)]
        values[np.ix_(np.searchsorted(index.steps, mine), columns)] = found
    return tensors, values


def _sizes(parts: Parts, run: Storage, index: Index, tensors: tuple[tuple[str, str], ...]) -> Array:
    """[T]: values of each tensor in the newest part; infinite where that is not known."""
    sizes = dict.fromkeys(tensors, np.inf)
    for part in index.newest_first[:1]:
        if layout := layout_of(parts, run, part):
            with np.errstate(invalid="ignore"):
                most = np.fmax.reduce(metric_of(parts, run, part, layout, "n"), axis=0)
            sizes |= {key: n for key, n in zip(layout.tensors, most.tolist(), strict=True) if n > 0}
    return np.array([sizes[key] for key in tensors])
