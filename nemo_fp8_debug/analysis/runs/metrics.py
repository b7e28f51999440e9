"""The `metrics` table for the analyses: its operands, its steps, and its columns, which are read when needed.

A small table is kept in memory. A large table is read in parts when an analysis needs them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import polars as pl

from ...core.memory import ArrayPool
from ...record.parts import count_table_rows
from ...record.reader import read_table_rows
from ...record.scan import RowChunk, TableScan, return_chunk_unchanged
from ...record.schema import SCHEMAS
from ...record.storage import FolderStorage
from . import cluster
from .grid import KEY, Floats, Ints, MetricGrid
from .source import Bools, InMemoryRows, RowSource, select_chunk_rows

Result = TypeVar("Result")
#: groups of columns that are read together
Together = Sequence[Sequence[str]]
#: largest number of rows to keep in memory
HELD = 1 << 20
#: number of unused values between two steps in memory. Without them, steps could be a power of two apart, and a tensor's
#: values at all steps would compete for few cache lines
_APART = 8
#: whether a row has NaN or infinity; null if neither NaN nor infinity was counted. The count of infinity may be null,
#: because msProbe counts only NaN
IS_NONFINITE = pl.max_horizontal("nan", "inf") > 0


@dataclass(frozen=True)
class MetricsTable:
    """Some operands and steps of a `metrics` table."""

    _source: RowSource
    #: layer and role, one row for each operand
    tensors: pl.DataFrame
    #: sampled steps, int64 [S], ascending
    steps: Ints
    #: index in these metrics of each operand and step of the source, int64; -1 if left out
    _operand: Ints
    _step: Ints
    #: required values of columns: for each column, the values that rows must have
    _only: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def _is_all(self) -> bool:
        """Return True if all rows of the source are included."""
        return not self._only and bool((self._operand >= 0).all() and (self._step >= 0).all())

    @cached_property
    def has_merged_steps(self) -> bool:
        """Return True if several steps of the source are combined into one step."""
        places = self._step[self._step >= 0]
        return len(np.unique(places)) < len(places)

    @cached_property
    def _values(self) -> dict[str, list[str | None]]:
        """Return the cache of `list_distinct_values`."""
        return {}

    @cached_property
    def _counts(self) -> dict[str, dict[str | None, Ints]]:
        """Return the cache of `count_rows_by_value`."""
        return {}

    @classmethod
    def from_rows(cls, rows: pl.DataFrame) -> MetricsTable:
        """Make metrics of rows in memory.

        Example:
            >>> rows = pl.DataFrame({"step": [0, 5], "layer": "fc1", "role": "input", "mse": [1.0, 2.0]})
            >>> metrics = MetricsTable.from_rows(rows)
            >>> metrics.tensors.row(0), metrics.steps.tolist(), metrics.read_all_rows(["mse"])["mse"].to_list()
            (('fc1', 'input'), [0, 5], [1.0, 2.0])
        """
        return cls._of(InMemoryRows(rows))

    @classmethod
    def read(cls, run: FolderStorage, held: int = HELD) -> MetricsTable:
        """Open the `metrics` table of a record.

        Args:
            held: largest number of rows to keep in memory.
        """
        return (
            cls.from_rows(read_table_rows(run, "metrics"))
            if count_table_rows(run, "metrics", held + 1) <= held
            else cls._of(TableScan(run))
        )

    @classmethod
    def _of(cls, source: RowSource) -> MetricsTable:
        operand, step = (np.arange(len(each)) for each in (source.operands, source.steps))
        return cls(source, source.operands, source.steps, operand, step)

    @property
    def is_read_lazily(self) -> bool:
        """Return True if rows are not kept in memory but read when needed."""
        return isinstance(self._source, TableScan)

    @property
    def columns(self) -> Set[str]:
        """Return the names of the columns, in order."""
        return self._source.schema.keys()

    def is_empty(self) -> bool:
        """Return True if there is no sample."""
        return not len(self.steps)

    def drop_steps(self, steps: Collection[int]) -> MetricsTable:
        """Return the metrics without some steps."""
        return self._over(~np.isin(self.steps, np.array(sorted(steps), dtype=np.int64))) if len(steps) else self

    def select_samples(self, samples: Ints) -> MetricsTable:
        """Return the metrics at some steps, given by index, with all operands."""
        kept = np.zeros(len(self.steps), dtype=bool)
        kept[samples] = True
        return replace(self, steps=self.steps[kept], _step=_renumbered(self._step, kept))

    def select_steps(self, steps: Ints) -> MetricsTable:
        """Return the metrics at some steps, with the operands that have rows at these steps."""
        return self._over(np.isin(self.steps, steps))

    def _over(self, kept: Bools) -> MetricsTable:
        return self if kept.all() else self.select_samples(np.flatnonzero(kept))._there()

    def renumber_steps(self, axis: pl.DataFrame) -> MetricsTable:
        """Return the metrics with other step numbers. Leave out steps that have no new number.

        Args:
            axis: step and its new number, ascending.
        """
        numbers = dict(axis.iter_rows())
        kept = np.array([step in numbers for step in self.steps.tolist()], dtype=bool)
        some = self._over(kept)
        steps = np.array([numbers[step] for step in self.steps[kept].tolist()], dtype=np.int64)
        unique, places = np.unique(steps, return_inverse=True)
        step = np.where(some._step >= 0, np.append(places, 0)[some._step], -1)
        return replace(some, steps=unique, _step=step)

    def rename_layers(self, names: Mapping[str, str]) -> MetricsTable:
        """Return the metrics with other layer names."""
        return replace(self, tensors=self.tensors.with_columns(pl.col("layer").replace(dict(names)))) if names else self

    def select_tensors(self, tensors: pl.DataFrame) -> MetricsTable:
        """Return the metrics of some operands, in the order of `tensors`. Keep the steps at which any of these operands was
        sampled.

        Args:
            tensors: layer and role of operands in these metrics.
        """
        return self if tensors.select(KEY).equals(self.tensors) else self.select_tensors_at_all_steps(tensors)._there()

    def select_tensors_at_all_steps(self, tensors: pl.DataFrame) -> MetricsTable:
        """Return the metrics of some operands, with all steps."""
        place = tensors.join(self.tensors.with_row_index("at"), on=KEY, how="left", maintain_order="left")["at"].to_numpy()
        here = np.full(len(self.tensors) + 1, -1)
        here[place] = np.arange(len(place))
        return replace(self, tensors=tensors.select(KEY), _operand=here[self._operand])

    def select_tensors_by_key(self, keys: pl.DataFrame) -> MetricsTable:
        """Return the metrics of the operands with layer and role in `keys`."""
        return self.select_tensors(self.tensors.join(keys, on=KEY, how="semi", maintain_order="left"))

    def outside(self, keys: pl.DataFrame) -> MetricsTable:
        """Return the metrics of the operands with layer and role not in `keys`."""
        return self.select_tensors(self.tensors.join(keys, on=KEY, how="anti", maintain_order="left"))

    def select_roles(self, *roles: str) -> MetricsTable:
        """Return the metrics of the operands with some roles."""
        return self.select_tensors(self.tensors.filter(pl.col("role").is_in(roles)))

    def filter_rows(self, column: str, values: Collection[str]) -> MetricsTable:
        """Return the metrics of rows that have one of the given values in a column. Keep operands and steps with such
        rows.
        """
        counts = self.count_rows_by_value(column)
        if counts.keys() <= set(values):
            return self
        none = np.zeros(len(self.tensors), dtype=np.int64)
        fitting = sum((counts[value] for value in values if value in counts), none)
        if ((fitting == 0) | (fitting == sum(counts.values(), none))).all():
            # Either all rows of an operand have such a value, or none.
            return self.select_tensors(self.tensors.filter(pl.Series(fitting > 0)))
        return replace(self, _only=(*self._only, (column, tuple(values))))._there()

    def list_distinct_values(self, column: str) -> list[str | None]:
        """Return the values of a text column, in the order of their first rows."""
        if column not in self._values:
            known = self._source.list_distinct_values(column)
            # If the whole table has a single value, all selected rows have this value.
            if known is not None and (self._is_all or len(known) == 1) and not self.is_empty():
                return known
            self._values[column] = _find_unique(column, self)
        return self._values[column]

    def count_rows_by_value(self, column: str) -> dict[str | None, Ints]:
        """For each value of a text column, return the number of rows of each operand with this value, [T]."""
        if column not in self._counts:
            self._counts[column] = self._count(column)
        return self._counts[column]

    def _count(self, column: str) -> dict[str | None, Ints]:
        values = self._source.list_distinct_values(column) or self.list_distinct_values(column)
        counts = _count_values(column, values, self)
        of_values = dict(zip([None, *(value for value in values if value is not None)], counts.T, strict=True))
        return {value: of_values[value] for value in values if of_values[value].any()}

    def _there(self) -> MetricsTable:
        """Return the metrics without operands and steps that have no rows."""
        operands, steps = np.zeros(len(self.tensors), dtype=bool), np.zeros(len(self.steps), dtype=bool)
        seen: Ints | None = None
        for chunk in self.read_chunks([]):
            for step, of_step in chunk.steps:
                steps[step] = True
                if of_step is not seen:  # steps with the same operands share the array
                    operands[of_step], seen = True, of_step
        tensors = self.tensors.filter(pl.Series(operands, dtype=pl.Boolean))
        operand, step = _renumbered(self._operand, operands), _renumbered(self._step, steps)
        return replace(self, tensors=tensors, steps=self.steps[steps], _operand=operand, _step=step)

    def read_chunks(self, columns: Sequence[str], then: Callable[[RowChunk], Any] = return_chunk_unchanged) -> Iterator[Any]:
        """Yield chunks of the columns, a few steps at a time. Operands and steps in chunks are indices in these metrics.

        Args:
            then: function that is applied to each chunk in several threads. Its results are yielded.
        """
        names = list(dict.fromkeys([*columns, *(name for name, _ in self._only)]))

        def fitting(chunk: RowChunk) -> Any:
            return then(select_chunk_rows(RowChunk(chunk.rows.select(columns), chunk.steps), _fits(chunk.rows, self._only)))

        yield from self._source.read_chunks(names, self._operand, self._step, fitting if self._only else then)

    def group_equal_steps(self, column: str | None) -> Iterator[tuple[RowChunk, Sequence[int]]]:
        """Yield chunks of a text column. Steps with equal operands and equal strings are represented by one step and their
        number.

        Args:
            column: text column; None: compare only the operands of steps.
        """
        if self._only:
            yield from ((chunk, [1] * len(chunk.steps)) for chunk in self.read_chunks([column] if column else []))
        else:
            yield from self._source.group_equal_steps(column, self._operand, self._step)

    def map_step_ranges(self, do: Callable[[MetricsTable], Result]) -> list[Result]:
        """Return the result of `do` for all steps. For a long table on a cluster, return one result for each worker's steps,
        in order.
        """
        workers = min(cluster.count_cluster_workers() if self.is_read_lazily else 0, len(self.steps))
        if not workers:
            return [do(self)]
        return cluster.map_on_cluster(
            do, (self.select_samples(some) for some in np.array_split(np.arange(len(self.steps)), workers))
        )

    def read_rows_in_batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield rows, a few steps at a time, with the given columns, tensor (index of the operand) and step."""
        there = [name for name in columns if name in self.columns]
        found: dict[str, pl.Expr] = {name: pl.lit(None, _type(name)) for name in columns}
        found |= {name: pl.col(name).cast(pl.String) if _type(name) == pl.String else pl.col(name) for name in there}
        for chunk in self.read_chunks(there):
            places = {"tensor": chunk.operand_of_each_row, "step": self.steps[chunk.step_of_each_row]}
            yield chunk.rows.select(**found, **{name: pl.Series(of, dtype=pl.Int64) for name, of in places.items()})

    def read_all_rows(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return all rows at once, with step, layer, role and the given columns. By default, return all columns."""
        names = list(self.columns if columns is None else dict.fromkeys(["step", *KEY, *columns]))
        read = [name for name in names if name not in ("step", *KEY)]
        found = self.add_tensor_names(pl.concat(self.map_step_ranges(partial(_read_all_rows, read)))).select(names)
        return found if found["step"].is_sorted() else found.sort("step", maintain_order=True)

    @cached_property
    def has_all_samples(self) -> bool:
        """Return True if each operand was sampled at each step."""
        return sum(len(operands) for chunk in self.read_chunks([]) for _, operands in chunk.steps) == len(
            self.tensors
        ) * len(self.steps)

    @cached_property
    def weight_sizes(self) -> dict[str, int]:
        """Return the number of values of W by layer, if known."""
        weights = self.select_roles("weight")
        most = _find_largest(weights.select_samples(np.arange(len(weights.steps))[-1:]), whole=True)
        if (most < 0).any():  # in the last sample, some weights or a rank's part are missing
            most = np.max(weights.map_step_ranges(_find_largest), axis=0)
        return {layer: n for layer, n in zip(weights.tensors["layer"], most.tolist(), strict=True) if n >= 0}

    def reduce_rows(self, columns: Sequence[str], gather: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
        """Reduce the rows with `gather`, a few steps at a time. Then reduce the results with `gather` again.

        Args:
            columns: columns to pass to `gather`, in addition to tensor (index of the operand), step, and count (1).
            gather: reduction that returns the same result for its own partial results as for the original rows.

        Example:
            >>> rows = pl.DataFrame({"step": [0, 5], "layer": "fc1", "role": "input", "mse": [1.0, 2.0]})
            >>> metrics = MetricsTable.from_rows(rows)
            >>> metrics.reduce_rows(["mse"], lambda rows: rows.select(pl.max("mse"), pl.sum("count"))).row(0)
            (2.0, 2)
        """
        found = self.map_step_ranges(partial(_gather_rows, columns, gather))
        return found[0] if len(found) == 1 else gather(pl.concat(found, how="diagonal"))

    def read_last_samples(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return layer, role and the given columns of each operand in its last sample."""
        rows = self.reduce_rows(columns, lambda rows: rows.unique("tensor", keep="last", maintain_order=True))
        return self.add_tensor_names(rows.sort("tensor")).select(*KEY, *columns)

    def add_tensor_names(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Replace the column `tensor` of a table by the columns layer and role."""
        keys = [self.tensors[name].gather(rows["tensor"]).alias(name) for name in KEY]
        return rows.select(*keys, pl.exclude("tensor"))

    def none(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return an empty table with tensor, step, count and columns."""
        types = {name: self._source.schema.get(name, _type(name)) for name in columns}
        return pl.DataFrame(schema={**types, **dict.fromkeys(("tensor", "step", "count"), pl.Int64)})

    @cached_property
    def grid(self) -> MetricGrid:
        """Return the metrics by tensor and step."""
        return self.build_grid()

    def build_grid(self, together: Together = ()) -> MetricGrid:
        """Return the metrics by tensor and step.

        Args:
            together: see `ColumnReader`.
        """
        return MetricGrid.from_columns(self.tensors, self.steps, ColumnReader(self, together))


class ColumnReader:
    """Columns by operand and step. A column is read when it is first used. Reading a group of columns drops the previous
    group.
    """

    def __init__(self, metrics: MetricsTable, together: Together = ()) -> None:
        """
        Args:
            together: groups of columns that are used together or in succession, and therefore read together. Any other
                column is read alone.
        """
        self._metrics, self._together = metrics, together
        self._values: dict[str, Floats] = {}
        self._buffers = ArrayPool()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Floats:
        """Return a column, [T, S], NaN without a value. `nonfinite` is 1 if any value is NaN or infinite, else 0."""
        with self._lock:
            if name not in self._values:
                self._values.clear()
                self._values = self._read(next((names for names in self._together if name in names), (name,)))
            return self._values[name]

    def _read(self, names: Sequence[str]) -> dict[str, Floats]:
        metrics = self._metrics
        there = [name for name in names if _made_of(name) <= metrics.columns]
        # Values are stored by step, in the order in which they are read. Clear each step just before its values arrive, so
        # that memory is touched only once. Clear merged steps in advance.
        shape = len(metrics.steps), len(metrics.tensors)
        values = {name: self._buffers.take_array(shape[0], shape[1] + _APART)[:, : shape[1]] for name in names}
        cleared = np.zeros(len(metrics.steps), dtype=bool)

        def clear(steps: Sequence[int] | Ints) -> None:
            for of_name in values.values():
                of_name[steps] = np.nan
            cleared[steps] = True

        def fill(chunk: RowChunk) -> None:
            clear([step for step in dict.fromkeys(step for step, _ in chunk.steps) if not cleared[step]])
            for name, of_rows in _values(chunk.rows, there).items():
                for step, here, operands in chunk.split_by_step():
                    values[name][step][operands] = of_rows[here]

        if metrics.has_merged_steps:
            clear(np.arange(len(metrics.steps)))
        if there:
            deque(metrics.read_chunks(sorted(set().union(*map(_made_of, there))), fill), 0)
        clear(np.flatnonzero(~cleared))
        return {name: of_name.T for name, of_name in values.items()}

    @cached_property
    def sampled(self) -> Bools:
        """Return whether each operand was sampled at each step, [T, S]."""
        found = np.zeros((len(self._metrics.steps), len(self._metrics.tensors)), dtype=bool)
        for chunk in self._metrics.read_chunks([]):
            for at, operands in chunk.steps:
                found[at][operands] = True
        return found.T


def _type(name: str) -> Any:
    """Return the type of a column that is missing in a table."""
    return SCHEMAS["metrics"].get(name, pl.Float64)


def _made_of(name: str) -> set[str]:
    """Return the table's columns from which a column of a grid is computed."""
    return {"nan", "inf"} if name == "nonfinite" else {name}


def _values(rows: pl.DataFrame, names: Sequence[str]) -> dict[str, Floats]:
    found = {name: rows.select(IS_NONFINITE).to_series() if name == "nonfinite" else rows[name] for name in names}
    return {name: values.cast(pl.Float64).to_numpy() for name, values in found.items()}


def _renumbered(places: Ints, kept: Bools) -> Ints:
    """Number the kept elements in order. Return the new index of each element, or -1 if it is not kept."""
    numbers = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    return numbers[places]


def _fits(rows: pl.DataFrame, only: Sequence[tuple[str, Sequence[str]]]) -> Bools:
    """Return whether each row has the required values."""
    fits = pl.all_horizontal([pl.col(name).is_in(values) for name, values in only]).fill_null(False)
    return rows.select(fits.alias("fits"))["fits"].to_numpy()


def select_common_tensors(baseline: MetricsTable, run: MetricsTable) -> tuple[MetricsTable, MetricsTable]:
    """Restrict both runs' metrics to the tensors that they have in common, in the order of the baseline."""
    tensors = baseline.tensors.join(run.tensors, on=KEY, how="semi", maintain_order="left")
    return baseline.select_tensors(tensors), run.select_tensors(tensors)


# Each function below reads the rows of some operands and steps once. Callers combine the results of several reads.


def _find_unique(column: str, metrics: MetricsTable) -> list[str | None]:
    """Return the values of a text column, in the order of their first rows."""
    found: dict[str | None, None] = {}
    for chunk, _ in metrics.group_equal_steps(column if column in metrics.columns else None):
        texts = (
            chunk.rows[column].cast(pl.String)
            if chunk.rows.width
            else pl.repeat(None, len(chunk.operand_of_each_row), eager=True)
        )
        found |= dict.fromkeys(texts.unique(maintain_order=True).to_list())
    return list(found)


def _count_values(column: str, values: Sequence[str | None], metrics: MetricsTable) -> Ints:
    """Return for each operand the number of nulls, and the number of times each string occurs, int64 [T, 1 + strings]."""
    texts = pl.Enum([value for value in values if value is not None])
    width = len(texts.categories) + 1

    counts = np.zeros((len(metrics.tensors), width), dtype=np.int64)
    for chunk, times in metrics.group_equal_steps(column if len(values) > 1 else None):
        codes = chunk.rows[column].cast(texts).to_physical().cast(pl.Int64) + 1 if len(values) > 1 else None
        of_rows = codes.fill_null(0).to_numpy() if codes is not None else int(values[:1] != [None])
        many = np.repeat(times, [len(operands) for _, operands in chunk.steps])
        counts += (
            np.bincount(chunk.operand_of_each_row * width + of_rows, many, counts.size)
            .astype(np.int64)
            .reshape(counts.shape)
        )
    return counts


def _read_all_rows(columns: Sequence[str], metrics: MetricsTable) -> pl.DataFrame:
    """Return all rows with columns, tensor and step."""
    return pl.concat([metrics.none(columns).drop("count"), *metrics.read_rows_in_batches(columns)])


def _find_largest(weights: MetricsTable, whole: bool = False) -> Ints:
    """For each operand, return the largest number of values in a sample; -1 if unknown.

    Args:
        whole: use only samples without missing ranks.
    """
    most = np.full(len(weights.tensors), -1)
    for rows in weights.read_rows_in_batches(["n", "nan", "inf", *(["ranks_missing"] if whole else [])]):
        counted = rows.filter(ranks_missing=0) if whole else rows
        known = counted.select("tensor", n=pl.col("n") + pl.col("nan") + pl.col("inf")).drop_nulls()
        np.maximum.at(most, known["tensor"].to_numpy(), known["n"].to_numpy())
    return most


def _gather_rows(
    columns: Sequence[str], gather: Callable[[pl.DataFrame], pl.DataFrame], metrics: MetricsTable
) -> pl.DataFrame:
    """See `MetricsTable.reduce_rows`."""
    found = gather(metrics.none(columns))
    for rows in metrics.read_rows_in_batches(columns):
        found = gather(pl.concat([found, gather(rows.with_columns(count=pl.lit(1, pl.Int64)))], how="diagonal"))
    return found
