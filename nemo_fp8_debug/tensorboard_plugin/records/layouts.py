"""Where the rows of a part are, a matrix of steps x tensors, and the values of a metric in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ...record.parquet import GROUP
from ...record.schema import SCHEMAS

Array = npt.NDArray[Any]
#: different layers in order, as keys
Layers = dict[str, None]
#: different sets of tensors that are kept
_LAYOUTS = 256
#: source of the scales of rows of what-if recipes
WHAT_IF = "what-if"
#: how many values are not finite: two columns as one
NONFINITE = "nonfinite"


class Tensors(tuple[tuple[str, str], ...]):
    """(layer, role) of tensors. Many parts share them, so that what is known of them is found once."""

    @cached_property
    def places(self) -> dict[tuple[str, str], int]:
        """The place of each."""
        return {key: i for i, key in enumerate(self)}

    @cached_property
    def layers(self) -> Layers:
        """Their layers."""
        return dict.fromkeys(layer for layer, _ in self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a part are."""

    #: int64 [S], ascending
    steps: Array
    #: of T tensors, in the order of the part
    tensors: Tensors
    #: int32 [S, T]: the row of each, -1 where there is none; None: rows lie step by step, complete
    rows: Array | None

    @property
    def is_wide(self) -> bool:
        """Whether reading one tensor takes less than reading all."""
        return len(self.tensors) > GROUP

    def row(self, step: int, key: tuple[str, str]) -> int | None:
        """The row of a tensor at a step; None where it has none."""
        at, tensor = int(np.searchsorted(self.steps, step)), self.tensors.places.get(key)
        if tensor is None or at == len(self.steps) or self.steps[at] != step:
            return None
        row = at * len(self.tensors) + tensor if self.rows is None else int(self.rows[at, tensor])
        return None if row < 0 else row

    def spread(self, values: Array, absent: float) -> Array:
        """[rows] -> [S, T]."""
        if self.rows is None:
            return values.reshape(len(self.steps), len(self.tensors))
        return np.append(values, values.dtype.type(absent))[self.rows]


@dataclass(frozen=True)
class Texts:
    """A column of text: uint16 codes [S, T] into `known`, 0 where there is none."""

    codes: Array
    known: list[str | None]


def numbers_in(column: pa.ChunkedArray | pa.Array) -> Array:
    """A column of numbers, NaN for null; read-only.

    Through polars: `to_numpy` of pyarrow imports pandas where it is installed, and the first answer would wait for that.
    """
    return pl.Series(column).to_numpy()


def coded(column: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """Codes int32, -1 for null, and what they stand for."""
    whole = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.unify_dictionaries().combine_chunks() if whole.num_chunks else pa.array([], pa.string())
    coded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    indices = coded.indices.fill_null(-1) if coded.null_count else coded.indices
    return numbers_in(indices).astype(np.int32, copy=False), coded.dictionary.to_pylist()


def columns_of(table: str, metric: str) -> tuple[str, ...]:
    """That `values_of` takes."""
    return ("nan", "inf") if metric == NONFINITE else (metric,) if metric in SCHEMAS[table] else ()


def values_of(rows: pa.Table, table: str, metric: str) -> Array:
    """float64 [rows] of a metric, NaN where there is none."""
    values = [np.asarray(numbers_in(rows[name]), np.float64) for name in columns_of(table, metric)]
    if not values:
        return np.full(len(rows), np.nan)
    # Of two counts one may be unknown: msProbe counts NaN alone.
    return np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0))


def is_tried(rows: pa.Table) -> Array:
    """bool [rows]: which rows are of what-if recipes."""
    codes, known = coded(rows["scale_source"])
    return codes == known.index(WHAT_IF) if WHAT_IF in known else np.zeros(len(codes), bool)


def laid_out(rows: pa.Table) -> tuple[Array, Tensors, Array | None]:
    """Steps, tensors and rows of a `Layout`, from the columns step, layer and role of a part.

    If it has scale_source too, rows of what-if recipes are left out.
    """
    step = numbers_in(rows["step"])
    (layer, layers), (role, roles) = coded(rows["layer"]), coded(rows["role"])
    key = layer * len(roles) + role
    if "scale_source" in rows.column_names and (tried := is_tried(rows)).any():
        kept = np.flatnonzero(~tried)
        steps, tensors, places = _laid_out(step[kept], key[kept], layers, roles)
        count = len(steps) * len(tensors)
        places = np.arange(count, dtype=np.int32).reshape(len(steps), len(tensors)) if places is None else places
        return steps, tensors, np.append(kept, -1).astype(np.int32)[places]
    return _laid_out(step, key, layers, roles)


def _laid_out(step: Array, key: Array, layers: list[str], roles: list[str]) -> tuple[Array, Tensors, Array | None]:
    width = int(np.argmax(step != step[0])) or len(step) if len(step) else 0
    whole = _step_by_step(step, key, width)
    at, steps = (None, step[::width]) if whole else (np.searchsorted(found := np.unique(step), step), found)
    met, first, tensor = np.unique(key[:width] if whole else key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they are first met
    tensors = _named(tuple(met[order].tolist()), tuple(layers), tuple(roles))
    if at is None:
        return steps, tensors, None
    table = np.full((len(steps), len(tensors)), -1, np.int32)
    table[at, np.argsort(order)[tensor]] = np.arange(len(step))
    return steps, tensors, table


@lru_cache(_LAYOUTS)
def _named(codes: tuple[int, ...], layers: tuple[str, ...], roles: tuple[str, ...]) -> Tensors:
    """Tensors by their codes: the parts of a run share them."""
    n = len(roles)
    return Tensors((layers[code // n], roles[code % n]) for code in codes)


def _step_by_step(step: Array, key: Array, width: int) -> bool:
    """Whether rows are `width` different tensors a step, the same at each, and steps ascend: what runs write."""
    if not width or len(step) % width or len(np.unique(key[:width])) < width:
        return False
    steps, keys = step.reshape(-1, width), key.reshape(-1, width)
    return bool((steps == steps[:, :1]).all() and (np.diff(steps[:, 0]) > 0).all() and (keys == keys[0]).all())
