"""Where the rows of a part are, a matrix of steps x tensors, and the values of a metric in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ...record.outline import Outline
from ...record.parquet import GROUP
from ...record.schema import SCHEMAS

Array = npt.NDArray[Any]
#: different layers in order, as keys
Layers = dict[str, None]
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


def lay_out(outline: Outline, names: Mapping[str, Tensors], tried: Array | None) -> Layout:
    """Return where the rows of a part are, whatever their order.

    Args:
        names: layer and role of the rows of stretches, by digest.
        tried: bool [rows]: which are left out; None: none.
    """
    place: dict[tuple[str, str], int] = {}
    places = {digest: np.array([place.setdefault(key, len(place)) for key in keys]) for digest, keys in names.items()}
    tensor = np.concatenate([places[stretch.digest] for stretch in outline.stretches])
    step = np.repeat([stretch.step for stretch in outline.stretches], [stretch.rows for stretch in outline.stretches])
    rows = np.arange(len(step)) if tried is None else np.flatnonzero(~tried)
    steps, at = np.unique(step[rows], return_inverse=True)
    met, first, column = np.unique(tensor[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they are first met
    keys = list(place)
    table = np.full((len(steps), len(met)), -1, np.int32)
    table[at, np.argsort(order)[column]] = rows
    return Layout(steps, Tensors(keys[i] for i in met[order].tolist()), table)
