"""Sources of the rows of a `metrics` table: a frame in memory, or a record that is read when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from ...record.scan import RowChunk, return_chunk_unchanged
from .grid import KEY, Ints

Bools = npt.NDArray[np.bool_]


class RowSource(Protocol):
    """A source of rows by operand and step."""

    @property
    def operands(self) -> pl.DataFrame:
        """Return layer and role of each operand, in the order of their first rows."""

    @property
    def steps(self) -> Ints:
        """Return the sampled steps, ascending."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Return the columns and their types."""

    def read_chunks(
        self,
        columns: Sequence[str],
        operands: Ints | None = None,
        steps: Ints | None = None,
        then: Callable[[RowChunk], Any] = return_chunk_unchanged,
    ) -> Iterator[Any]:
        """Yield the result of `then` for chunks of the columns, a few steps at a time.

        Args:
            operands, steps: the new index of each operand or step in chunks; -1 leaves it out. None keeps all indices.
        """

    def group_equal_steps(
        self, column: str | None, operands: Ints | None = None, steps: Ints | None = None
    ) -> Iterator[tuple[RowChunk, Sequence[int]]]:
        """Yield chunks of a text column. Steps with equal operands and equal strings are represented by one step and their
        number.

        Args:
            column: text column; None: compare only the operands of steps.
            operands, steps: as in `read_chunks`.
        """

    def list_distinct_values(self, column: str) -> list[str | None] | None:
        """Return the distinct values of a text column in the order of their first rows, or None if all rows would have to be
        read.
        """


class InMemoryRows:
    """Rows in memory."""

    def __init__(self, rows: pl.DataFrame) -> None:
        rows = rows if rows["step"].is_sorted() else rows.sort("step", maintain_order=True)
        # Group by codes, so that the names of all rows are read only once.
        names = rows.select(pl.col(KEY).cast(pl.Categorical)).with_row_index("row")
        grouped = names.group_by(KEY, maintain_order=True).agg("row")
        self.operands = grouped.select(pl.col(KEY).cast(pl.String))
        self.steps: Ints = rows["step"].unique().sort().to_numpy()
        self.schema: Mapping[str, Any] = rows.schema
        self._rows = rows
        self._operand = np.empty(len(rows), dtype=np.int64)
        lengths = grouped["row"].list.len().to_numpy()
        self._operand[grouped["row"].explode().to_numpy()] = np.repeat(np.arange(len(grouped)), lengths)
        of_steps = rows.group_by("step", maintain_order=True).len()
        self._ends = np.cumsum(of_steps["len"].to_numpy())

    def read_chunks(
        self,
        columns: Sequence[str],
        operands: Ints | None = None,
        steps: Ints | None = None,
        then: Callable[[RowChunk], Any] = return_chunk_unchanged,
    ) -> Iterator[Any]:
        """See `RowSource`. All rows come in one chunk."""
        of_rows = self._operand if operands is None else operands[self._operand]
        of_steps = np.arange(len(self.steps)) if steps is None else steps
        operands_of = np.split(of_rows, self._ends[:-1]) if len(self._ends) else []
        whole = RowChunk(self._rows.select(columns), list(zip(of_steps.tolist(), operands_of, strict=True)))
        kept = (of_rows >= 0) & (whole.step_of_each_row >= 0)
        yield then(whole if kept.all() else select_chunk_rows(whole, kept))

    def group_equal_steps(
        self, column: str | None, operands: Ints | None = None, steps: Ints | None = None
    ) -> Iterator[tuple[RowChunk, Sequence[int]]]:
        """See `RowSource`. No two steps are treated as equal."""
        for chunk in self.read_chunks([column] if column else [], operands, steps):
            yield chunk, [1] * len(chunk.steps)

    def list_distinct_values(self, column: str) -> list[str | None] | None:
        """See `RowSource`."""
        return self._rows[column].unique(maintain_order=True).to_list()


def select_chunk_rows(chunk: RowChunk, kept: Bools) -> RowChunk:
    """Return some rows of a chunk."""
    rows = chunk.rows.filter(pl.Series(kept)) if chunk.rows.width else chunk.rows
    steps = ((step, operands[kept[here]]) for step, here, operands in chunk.split_by_step())
    return RowChunk(rows, [(step, operands) for step, operands in steps if len(operands)])
