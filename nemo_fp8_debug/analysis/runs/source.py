"""Where the rows of a `metrics` table come from: a frame that is held, or a record that is read as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from ...record.scan import Chunk, itself
from .grid import KEY, Ints

Bools = npt.NDArray[np.bool_]


class Source(Protocol):
    """Rows of operands and steps."""

    @property
    def operands(self) -> pl.DataFrame:
        """layer, role of each, in the order of their first rows."""

    @property
    def steps(self) -> Ints:
        """Ascending."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Columns and their types."""

    def chunks(
        self,
        columns: Sequence[str],
        operands: Bools | None = None,
        steps: Bools | None = None,
        then: Callable[[Chunk], Any] = itself,
    ) -> Iterator[Any]:
        """Columns of some operands and steps, None: of all; a few steps at a time, and what `then` makes of them."""

    def values(self, column: str) -> list[str | None] | None:
        """Those of a text column, in the order of their first rows; None: that takes reading them."""


class Held:
    """Rows in memory."""

    def __init__(self, rows: pl.DataFrame) -> None:
        rows = rows if rows["step"].is_sorted() else rows.sort("step", maintain_order=True)
        # Grouped as codes: the names of all rows are looked at once.
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
        self._steps = list(enumerate(of_steps["len"].to_list()))

    def chunks(
        self,
        columns: Sequence[str],
        operands: Bools | None = None,
        steps: Bools | None = None,
        then: Callable[[Chunk], Any] = itself,
    ) -> Iterator[Any]:
        """See `Source`; all at once."""
        kept = np.ones(len(self._rows), dtype=bool)
        if operands is not None:
            kept &= operands[self._operand]
        whole = Chunk(self._rows.select(columns), self._operand, self._steps)
        if steps is not None:
            kept &= steps[whole.step]
        yield then(whole if kept.all() else some_of(whole, kept))

    def values(self, column: str) -> list[str | None] | None:
        """See `Source`."""
        return self._rows[column].unique(maintain_order=True).to_list()


def some_of(chunk: Chunk, kept: Bools) -> Chunk:
    """Some rows of a chunk."""
    rows = chunk.rows.filter(pl.Series(kept)) if chunk.rows.width else chunk.rows
    counts = ((step, int(kept[here].sum())) for step, here in chunk.spans())
    return Chunk(rows, chunk.operand[kept], [(step, n) for step, n in counts if n])
