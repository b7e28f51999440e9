"""Process the operands of long records in blocks, as many at a time as fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from ...core.memory import free_unused
from ...core.threads import run_ahead
from ...record.parquet import GROUP
from . import cluster
from .grid import Grid
from .metrics import Metrics, Together

#: values that are sorted at once, and into how many ranges others are counted
_AT_ONCE, _RANGES = 1 << 21, 16
_SIGN = np.uint64(1 << 63)


def compute_median(metrics: Metrics, column: str, at_once: int = _AT_ONCE) -> float:
    """The median of all values of a column, without NaN; NaN if there are none.

    Values are counted by range, and those of the range that has the median are read again, until few are left.

    Args:
        at_once: values that are sorted.

    Example:
        >>> rows = pl.DataFrame({"step": [0, 1, 2, 3], "layer": "fc1", "role": "input", "mse": [4.0, 1.0, 2.0, None]})
        >>> compute_median(Metrics.of(rows), "mse")
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


Result = TypeVar("Result")
#: values that grids hold at a time: 1 GiB
CELLS = 1 << 27
#: part of a block that the last one may be larger by
_REST = 0.25
#: tensors that a worker of a cluster gets at a time, at the least
_FEWEST = 64


def map_over_blocks(do: Callable[..., Result], *runs: Metrics, together: Together = ()) -> list[Result]:
    """`do` of the same tensors of some runs as grids, as many tensors at a time as fit into memory, in order.

    On a cluster its workers share the work; see `cluster`.

    Args:
        runs: over the same tensors.
        together: groups of columns, each of which is read at once; see `ColumnReader`.
    """
    cells = sum(len(run.steps) for run in runs) * max(map(len, together), default=1)
    at_once, tensors = max(1, CELLS // max(cells, 1)), len(runs[0].tensors)
    workers = cluster.count_workers() if tensors and all(run.is_long for run in runs) else 0
    if workers:
        # As many for each, and no more than that takes: each opens all parts.
        turns = -(-tensors // (at_once * workers))
        at_once = max(_FEWEST, -(-tensors // (turns * workers)))
    elif at_once >= tensors:
        return [do(*(run.grids(together) for run in runs))]
    some = _slices(tensors, at_once, workers)
    return cluster.map_on_cluster(
        partial(_of_block, do, together), ([run.narrowed(run.tensors[s]) for run in runs] for s in some)
    )


def _slices(tensors: int, at_once: int, workers: int = 0) -> list[slice]:
    """Of so many tensors at a time: whole row groups, none of which is read twice then, if all workers get as many."""
    some = _cut(tensors, at_once - at_once % GROUP if at_once > GROUP else at_once)
    return _cut(tensors, at_once) if workers and len(some) % workers else some


def _cut(tensors: int, at_once: int) -> list[slice]:
    """Without a small rest."""
    firsts = list(range(0, tensors, at_once))
    if len(firsts) > 1 and tensors - firsts[-1] < _REST * at_once:
        firsts.pop()
    return [slice(*ends) for ends in itertools.pairwise([*firsts, tensors])]


def _of_block(do: Callable[..., Result], together: Together, runs: Sequence[Metrics]) -> Result:
    found = do(*(run.grids(together) for run in runs))
    free_unused()
    return found


def compute_by_tensor(
    functions: Sequence[Callable[..., Mapping[str, npt.NDArray[Any]]]], *grids: Grid
) -> dict[str, npt.NDArray[Any]]:
    """What functions tell of each tensor of some grids: columns by name, [T] each.

    Args:
        functions: of grids over some of the tensors; each is done with all tensors before the next one begins.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for function in functions:
        of_parts = compute_in_parts(function, *grids)
        found |= {name: np.concatenate([of_part[name] for of_part in of_parts]) for name in of_parts[0]}
    return found


def compute_in_parts(do: Callable[..., Result], *grids: Grid) -> list[Result]:
    """`do` of grids over some of the tensors at a time, in order; once, of all, if there are few."""
    return list(run_ahead(lambda some: do(*(grid.rows(some) for grid in grids)), grids[0].parts()))
