"""Read a metric of all tensors at single steps, or over all steps grouped into the columns of a picture."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

from ...analysis.comparison.drift import parse_gemm_kind, parse_layer_index
from ...core.threads import map_in_threads
from ...record.schema import Part
from ...record.storage import FolderStorage
from ..web import BadParameterError
from . import metadata
from .metadata import list_tensors
from .part_matrices import Array, CachedPartReader, SampledStepIndex, TensorKeys

#: largest number of sampled steps in one answer
MOST_STEPS = 128
#: share of the sampled steps at the start of a run that counts as warm-up
WARM_UP = 0.1
#: number of sets of tensors for which descriptions are cached
_PLACED = 32


@lru_cache(_PLACED)
def make_tensor_columns(tensors: TensorKeys) -> dict[str, list[Any]]:
    """Return layer, role, kind and depth of tensors."""
    layers = [layer for layer, _ in tensors]
    roles = [role for _, role in tensors]
    return {
        "layer": layers,
        "role": roles,
        "kind": list(map(parse_gemm_kind, layers)),
        "depth": list(map(parse_layer_index, layers)),
    }


def list_newest_tensors(parts: CachedPartReader, run: FolderStorage, index: SampledStepIndex) -> TensorKeys:
    """Return the tensors of the newest readable part."""
    for part in index.newest_parts_first:
        if layout := parts.read_layout_unless_damaged(run, part):
            return layout.tensors
    return TensorKeys()


def pack_metric_at_steps(parts: CachedPartReader, run: FolderStorage, metric: str, first: int, last: int) -> bytes:
    """Return a metric of all tensors at the sampled steps in [first, last].

    The answer is a header (steps, layer, role, kind, depth), and float32 [steps, tensors].

    Raises:
        BadParameterError: there are more than `MOST_STEPS` sampled steps.
    """

    def read(index: SampledStepIndex) -> bytes:
        steps = index.steps[(index.steps >= first) & (index.steps <= last)].tolist()
        if len(steps) > MOST_STEPS:
            raise BadParameterError(
                f"There are {len(steps)} sampled steps from {first} to {last}; ask for {MOST_STEPS} at a time."
            )
        owners = list(dict.fromkeys(index.owner[step] for step in steps))
        layouts = {part: layout for part in owners if (layout := parts.read_layout_unless_damaged(run, part))}
        tensors = list(dict.fromkeys(key for held in dict.fromkeys(lay.tensors for lay in layouts.values()) for key in held))
        column = {key: i for i, key in enumerate(tensors)}
        values = np.full((len(steps), len(tensors)), np.nan, "<f4")
        for part, layout in layouts.items():
            mine = [i for i, step in enumerate(steps) if index.owner[step] == part]
            at = np.searchsorted(layout.steps, [steps[i] for i in mine])
            metrics = parts.read_metric_or_nan(run, part, layout, metric)
            with np.errstate(over="ignore"):
                found = metrics[at].astype("<f4")
            if len(layout.tensors) == len(tensors) and list(layout.tensors) == tensors:
                values[mine] = found
            else:
                values[np.ix_(mine, [column[key] for key in layout.tensors])] = found
        return pack_header_and_array({"steps": steps, **make_tensor_columns(tuple(tensors))}, values)

    return parts.read_with_retry(run, read)


def pack_header_and_array(header: dict[str, Any], values: Any) -> bytes:
    """Return the length of a JSON header (4 bytes, little endian), the header, and an array."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + bytes(values.tobytes())


#: usual number of values in an answer, least number of columns, and largest number of values
ENOUGH_VALUES, ENOUGH_COLUMNS, MOST_VALUES = 1_200_000, 200, 4_000_000


def pack_heatmap(
    parts: CachedPartReader, run: FolderStorage, metric: str, first: int | None, last: int | None, columns: int
) -> bytes:
    """Return a metric of all tensors over the sampled steps in [first, last].

    Group the steps into intervals of `width` steps, beginning at `from`. For each interval that has samples, return a column
    with the worst value of each tensor.

    Args:
        first: first step; None: the first sampled step.
        last: last step; None: the last sampled step.
        columns: largest number of columns.

    Returns:
        A header and float32 [tensors, columns], NaN for a tensor without samples. The header has from, width, warm_up (its
        last step); first, last (sampled steps) and samples of each column; layer, role, kind and depth of each tensor, in
        order of execution.
    """

    def read(index: SampledStepIndex) -> bytes:
        begin = int(first if first is not None else index.steps[0] if len(index.steps) else 0)
        end = int(last if last is not None else index.steps[-1] if len(index.steps) else 0)
        steps = index.steps[(index.steps >= begin) & (index.steps <= end)]
        owners = list(dict.fromkeys(index.owner[step] for step in steps.tolist()))
        layouts = {part: layout for part in owners if (layout := parts.read_layout_unless_damaged(run, part))}
        tensors = list_tensors(layouts)
        width = _width(end - begin + 1, columns, len(tensors))
        stretches, first_of, samples = np.unique((steps - begin) // width, return_index=True, return_counts=True)
        worst = np.full((len(stretches), len(tensors)), np.nan)
        place = {key: i for i, key in enumerate(tensors)}
        # Most parts have the same tensors.
        places = {some: np.array([place[key] for key in some]) for some in {layout.tensors for layout in layouts.values()}}

        def of_part(part: Part) -> tuple[Array, Array]:
            """Return the indices of the columns that a part contributes to, and the part's worst values in each."""
            mine = np.array(index.steps_by_part[part])
            mine = mine[(mine >= begin) & (mine <= end)]
            at, starts = np.unique(np.searchsorted(stretches, (mine - begin) // width), return_index=True)
            rows = np.searchsorted(layouts[part].steps, mine)
            values = parts.read_metric_or_nan(run, part, layouts[part], metric)
            values = values if len(rows) == len(values) else values[rows]
            return at, _worst_of(metric, values, starts)

        for layout, (at, found) in zip(layouts.values(), map_in_threads(of_part, list(layouts)), strict=True):
            there = np.ix_(at, places[layout.tensors])
            worst[there] = _worse(metric, worst[there], found)
        header = {
            "from": begin,
            "width": width,
            "warm_up": find_warm_up_end(index),
            "first": steps[first_of].tolist(),
            "last": steps[first_of + samples - 1].tolist(),
            "samples": samples.tolist(),
        }
        with np.errstate(over="ignore"):
            return pack_header_and_array(
                {**header, **make_tensor_columns(tensors)}, np.ascontiguousarray(worst.T.astype("<f4"))
            )

    return parts.read_with_retry(run, read)


def find_warm_up_end(index: SampledStepIndex) -> int | None:
    """Return the last step of a run's warm-up, or None if there are fewer than two samples."""
    return int(index.steps[int(np.ceil(WARM_UP * len(index.steps))) - 1]) if len(index.steps) > 1 else None


def _width(steps: int, columns: int, tensors: int) -> int:
    """Return the number of steps in a column."""
    tensors = max(1, tensors)
    most = max(1, min(columns, max(ENOUGH_COLUMNS, ENOUGH_VALUES // tensors), MOST_VALUES // tensors))
    return max(1, -(-steps // most))


def _worst_of(metric: str, values: Array, starts: Array) -> Array:
    """Return the worst values of the rows from each start to the next start, [S, T] -> [len(starts), T]."""
    if len(starts) == len(values):
        return values
    worse = metadata.find_worse_sign(metric)
    if worse is not None:
        return _reduced(np.fmax if worse > 0 else np.fmin, values, starts)
    return _farther(_reduced(np.fmin, values, starts), _reduced(np.fmax, values, starts))


def _reduced(of_two: np.ufunc, values: Array, starts: Array) -> Array:
    """Reduce like `of_two.reduceat` along the first axis, but several times faster for few rows."""
    sizes = np.diff(starts, append=len(values))
    found: Array = values[starts]
    for more in range(1, int(sizes.max())):
        longer = np.flatnonzero(sizes > more)
        found[longer] = of_two(found[longer], values[starts[longer] + more])
    return found


def _worse(metric: str, a: Array, b: Array) -> Array:
    """Return the worse value of each pair, ignoring NaN."""
    worse = metadata.find_worse_sign(metric)
    found: Array = _farther(a, b) if worse is None else np.fmax(a, b) if worse > 0 else np.fmin(a, b)
    return found


def _farther(a: Array, b: Array) -> Array:
    """Return the value of each pair that is farther from 0."""
    return np.where(np.isnan(b) | (np.abs(a) > np.abs(b)), a, b)
