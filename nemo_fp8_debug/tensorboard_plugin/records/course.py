"""A metric of all tensors over all steps, as few columns as a picture has."""

from __future__ import annotations

import numpy as np

from ...core.threads import ahead
from ...record.schema import Part
from ...record.storage import Storage
from . import metadata
from .execution import tensors_of
from .extents import end_of_warm_up
from .layouts import Array
from .part_matrices import Index, Parts
from .tables import layout_of, metric_of, packed, placed

#: values in an answer: of more tensors there are fewer columns, down to as many as still show a course, and then fewer yet
ENOUGH_VALUES, ENOUGH_COLUMNS, MOST_VALUES = 1_200_000, 200, 4_000_000


def course(parts: Parts, run: Storage, metric: str, first: int | None, last: int | None, columns: int) -> bytes:
    """A metric of all tensors over the sampled steps in [first, last].

    Steps are binned into stretches of `width` steps, the first from `from` on; of each that has samples there is a column
    with the worst value of each tensor.

    Args:
        first: None: from the first sampled step; `last` likewise.
        columns: at most.

    Returns:
        A header (from, width, the last step of the run's warm-up; of each column the first and last sampled step and how
        many samples; layer, role, kind and depth of each tensor, in order of execution), and float32 [tensors, columns],
        NaN where a tensor has no sample.
    """

    def read(index: Index) -> bytes:
        begin = int(first if first is not None else index.steps[0] if len(index.steps) else 0)
        end = int(last if last is not None else index.steps[-1] if len(index.steps) else 0)
        steps = index.steps[(index.steps >= begin) & (index.steps <= end)]
        owners = list(dict.fromkeys(index.owner[step] for step in steps.tolist()))
        layouts = {part: layout for part in owners if (layout := layout_of(parts, run, part))}
        tensors = tensors_of(layouts)
        width = _width(end - begin + 1, columns, len(tensors))
        stretches, first_of, samples = np.unique((steps - begin) // width, return_index=True, return_counts=True)
        worst = np.full((len(stretches), len(tensors)), np.nan)
        place = {key: i for i, key in enumerate(tensors)}
        # Parts have the same tensors, but for few.
        places = {some: np.array([place[key] for key in some]) for some in {layout.tensors for layout in layouts.values()}}

        def of_part(part: Part) -> tuple[Array, Array]:
            """Places among the stretches, and the worst values in each."""
            mine = np.array(index.held[part])
            mine = mine[(mine >= begin) & (mine <= end)]
            at, starts = np.unique(np.searchsorted(stretches, (mine - begin) // width), return_index=True)
            rows = np.searchsorted(layouts[part].steps, mine)
            values = metric_of(parts, run, part, layouts[part], metric)
            values = values if len(rows) == len(values) else values[rows]
            return at, _worst_of(metric, values, starts)

        for layout, (at, found) in zip(layouts.values(), ahead(of_part, list(layouts)), strict=True):
            there = np.ix_(at, places[layout.tensors])
            worst[there] = _worse(metric, worst[there], found)
        header = {
            "from": begin,
            "width": width,
            "warm_up": end_of_warm_up(index),
            "first": steps[first_of].tolist(),
            "last": steps[first_of + samples - 1].tolist(),
            "samples": samples.tolist(),
        }
        with np.errstate(over="ignore"):
            return packed({**header, **placed(tensors)}, np.ascontiguousarray(worst.T.astype("<f4")))

    return parts.settled(run, read)


def _width(steps: int, columns: int, tensors: int) -> int:
    """Steps in a column."""
    tensors = max(1, tensors)
    most = max(1, min(columns, max(ENOUGH_COLUMNS, ENOUGH_VALUES // tensors), MOST_VALUES // tensors))
    return max(1, -(-steps // most))


def _worst_of(metric: str, values: Array, starts: Array) -> Array:
    """[S, T] -> [len(starts), T]: the worst of the rows from each start to the next."""
    if len(starts) == len(values):
        return values
    worse = metadata.worse_of(metric)
    if worse is not None:
        return _reduced(np.fmax if worse > 0 else np.fmin, values, starts)
    return _farther(_reduced(np.fmin, values, starts), _reduced(np.fmax, values, starts))


def _reduced(of_two: np.ufunc, values: Array, starts: Array) -> Array:
    """As `of_two.reduceat` does along the first axis, which takes several times as long over so few rows."""
    sizes = np.diff(starts, append=len(values))
    found: Array = values[starts]
    for more in range(1, int(sizes.max())):
        longer = np.flatnonzero(sizes > more)
        found[longer] = of_two(found[longer], values[starts[longer] + more])
    return found


def _worse(metric: str, a: Array, b: Array) -> Array:
    """Of each pair; of a value and NaN the value."""
    worse = metadata.worse_of(metric)
    found: Array = _farther(a, b) if worse is None else np.fmax(a, b) if worse > 0 else np.fmin(a, b)
    return found


def _farther(a: Array, b: Array) -> Array:
    """What is farther from 0."""
    return np.where(np.isnan(b) | (np.abs(a) > np.abs(b)), a, b)
