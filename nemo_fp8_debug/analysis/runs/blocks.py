"""Process the operands of long records in blocks that fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from ...core.memory import release_freed_memory
from ...core.threads import map_in_threads
from ...record.parquet import GROUP
from . import cluster
from .grid import MetricGrid
from .metrics import MetricsTable, Together

#: largest number of values to sort at once, and log2 of the number of ranges into which we count more values
_AT_ONCE, _RANGES = 1 << 21, 16
_SIGN = np.uint64(1 << 63)


def compute_column_median(metrics: MetricsTable, column: str, at_once: int = _AT_ONCE) -> float:
    """Return the median of all values of a column, ignoring NaN. Return NaN if there are no values.

    Count the values in ranges, and repeat this for the range that contains the median, until few values are left.

    Args:
        at_once: largest number of values to sort.

    Example:
        >>> rows = pl.DataFrame({"step": [0, 1, 2, 3], "layer": "fc1", "role": "input", "mse": [4.0, 1.0, 2.0, None]})
        >>> compute_column_median(MetricsTable.from_rows(rows), "mse")
        2.0
    """
    low, high, below, total, inside = 0, (1 << 64) - 1, 0, 0, at_once + 1
    while inside > at_once:
        shift = max((high - low).bit_length() - _RANGES, 0)
        counts = np.zeros(((high - low) >> shift) + 1, dtype=np.int64)
        for keys in _between(metrics, column, low, high):
            counts += np.bincount(((keys - np.uint64(low)) >> np.uint64(shift)).astype(np.int64), minlength=len(counts))
        total = total or int(counts.sum())
        if not total:
            return float("nan")
        ends = below + np.cumsum(counts)
        at, other = (int(np.searchsorted(ends, rank, side="right")) for rank in ((total - 1) // 2, total // 2))
        below, inside = int(ends[at] - counts[at]), int(counts[at])
        split = low + (other << shift)
        low, high = low + (at << shift), min(low + ((at + 1) << shift) - 1, high)
        if at != other:  # the two middle values: the largest of this range, and the smallest of the other
            nearest = [_nearest(keys, high, split) for keys in _keys(metrics, column)]
            return float(_values(np.array([max(a for a, _ in nearest), min(b for _, b in nearest)], dtype=np.uint64)).mean())
        if low == high:
            return float(_values(np.array([low], dtype=np.uint64))[0])
    keys = np.concatenate(list(_between(metrics, column, low, high)))
    places = sorted({(total - 1) // 2 - below, total // 2 - below})
    return float(_values(np.partition(keys, places)[places]).mean())


def _nearest(keys: npt.NDArray[np.uint64], high: int, split: int) -> tuple[int, int]:
    """Return the largest key up to `high`, and the smallest key that is at least `split`."""
    below, above = keys[keys <= high], keys[keys >= split]
    return int(below.max(initial=0)), int(above.min(initial=(1 << 64) - 1))


def _between(metrics: MetricsTable, column: str, low: int, high: int) -> Iterator[npt.NDArray[np.uint64]]:
    for keys in _keys(metrics, column):
        yield keys[(keys >= low) & (keys <= high)]


def _keys(metrics: MetricsTable, column: str) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield integers that sort like the values."""
    for rows in metrics.read_rows_in_batches([column]):
        values = rows[column].cast(pl.Float64).to_numpy()
        bits = values[~np.isnan(values)].view(np.uint64)
        yield np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).view(np.float64)


Result = TypeVar("Result")
#: largest number of values in grids at a time: 1 GiB
CELLS = 1 << 27
#: the last block may be larger than the others by this fraction
_REST = 0.25
#: least number of tensors that a worker of a cluster gets at a time
_FEWEST = 64


def map_tensor_chunks(do: Callable[..., Result], *runs: MetricsTable, together: Together = ()) -> list[Result]:
    """Apply `do` to grids of all runs, for as many tensors at a time as fit into memory.

    Return the results in order. If a cluster is in use, its workers share the work; see `cluster`.

    Args:
        do: function that takes one grid for each run.
        runs: metrics of the same tensors.
        together: groups of columns to read together; see `ColumnReader`.
    """
    cells = sum(len(run.steps) for run in runs) * max(map(len, together), default=1)
    at_once, tensors = max(1, CELLS // max(cells, 1)), len(runs[0].tensors)
    workers = cluster.count_cluster_workers() if tensors and all(run.is_read_lazily for run in runs) else 0
    if workers:
        # Divide the tensors into as few equal shares as possible, because all parts are opened again for each share.
        turns = -(-tensors // (at_once * workers))
        at_once = max(_FEWEST, -(-tensors // (turns * workers)))
    elif at_once >= tensors:
        return [do(*(run.build_grid(together) for run in runs))]
    some = _slices(tensors, at_once, workers)
    return cluster.map_on_cluster(
        partial(_of_block, do, together), ([run.select_tensors_at_all_steps(run.tensors[s]) for run in runs] for s in some)
    )


def _slices(tensors: int, at_once: int, workers: int = 0) -> list[slice]:
    """Return slices of whole row groups, so that no group is read twice. If the workers would get unequal
    shares, split groups.
    """
    some = _cut(tensors, at_once - at_once % GROUP if at_once > GROUP else at_once)
    return _cut(tensors, at_once) if workers and len(some) % workers else some


def _cut(tensors: int, at_once: int) -> list[slice]:
    """Return slices of `at_once` tensors. Merge a small rest into the last slice."""
    firsts = list(range(0, tensors, at_once))
    if len(firsts) > 1 and tensors - firsts[-1] < _REST * at_once:
        firsts.pop()
    return [slice(*ends) for ends in itertools.pairwise([*firsts, tensors])]


def _of_block(do: Callable[..., Result], together: Together, runs: Sequence[MetricsTable]) -> Result:
    found = do(*(run.build_grid(together) for run in runs))
    release_freed_memory()
    return found


def compute_by_tensor(
    functions: Sequence[Callable[..., Mapping[str, npt.NDArray[Any]]]], *grids: MetricGrid
) -> dict[str, npt.NDArray[Any]]:
    """Compute columns from grids. Return the columns by name, [T] each.

    Args:
        functions: functions of grids of some tensors. Each function processes all tensors before the next function begins.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for function in functions:
        of_parts = map_grid_slices(function, *grids)
        found |= {name: np.concatenate([of_part[name] for of_part in of_parts]) for name in of_parts[0]}
    return found


def map_grid_slices(do: Callable[..., Result], *grids: MetricGrid) -> list[Result]:
    """Apply `do` to grids of some tensors at a time, or of all tensors if there are few. Return the results in order."""
    return list(
        map_in_threads(lambda some: do(*(grid.select_tensors_by_index(some) for grid in grids)), grids[0].slice_tensors())
    )
