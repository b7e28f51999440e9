"""Reads a table column by column and a few steps at a time, so that memory does not grow with the record.

Which rows are of which operand and step is known from outlines in the footers of parts. Of a part without one, which an
earlier release wrote, the names are read.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ..core.threads import ahead
from ..errors import RecordError
from . import migration, parquet
from .outline import Outline, Stretch, stretches
from .reader import Address, check, complain_of, of_schema, parts_of, reason
from .schema import SCHEMAS, Part, arrow_schema
from .storage import Storage

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_KEYS = ("step", "layer", "role")


class Chunk(NamedTuple):
    """Rows of a few steps, those of each step one behind the other."""

    #: the columns that were asked for
    rows: pl.DataFrame
    #: int64 [rows]: places among the operands
    operand: Ints
    #: places among the steps, and how many rows each has
    steps: Sequence[tuple[int, int]]

    @property
    def step(self) -> Ints:
        """int64 [rows]: places among the steps."""
        return np.repeat([step for step, _ in self.steps], [rows for _, rows in self.steps]).astype(np.int64)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Each step, and where its rows are."""
        first = 0
        for step, rows in self.steps:
            yield step, slice(first, first + rows)
            first += rows


@dataclass(frozen=True)
class _Run:
    """Rows of one step in a part, one behind the other."""

    #: place among the steps
    step: int
    #: place of the first row in the part
    first: int
    #: of the operands of each row, among the layouts
    layout: int


class Scan:
    """The rows of a table of a record: of a step that was trained twice, the later attempt's."""

    def __init__(self, run: Address, table: str = "metrics") -> None:
        """
        Args:
            run: folder of a record.
            table: one with operands.
        """
        self._storage, self._table = Storage(run), table
        index = _Index(self._storage, table)
        #: int64, ascending
        self.steps: Ints = np.array(sorted(index.owner), dtype=np.int64)
        self._parts = index.parts(self.steps)
        used = list(dict.fromkeys(run.layout for _, runs in self._parts for run in runs))
        order = list(dict.fromkeys(np.concatenate([np.zeros(0, np.int64), *(index.layouts[i] for i in used)]).tolist()))
        known = index.operands
        #: layer, role of each operand, in the order of their first rows
        self.operands = pl.DataFrame([known[i] for i in order], schema={"layer": pl.String, "role": pl.String}, orient="row")
        place = np.empty(len(known), dtype=np.int64)
        place[order] = np.arange(len(order))
        self._layouts = {i: place[index.layouts[i]] for i in used}
        self._everything = {i: np.arange(len(index.layouts[i])) for i in used}
        self._texts = index.texts()
        #: parts, columns and rows whose values have been looked at
        self._sound: set[tuple[Any, ...]] = set()
        self.schema: Mapping[str, Any] = SCHEMAS[table]

    def values(self, column: str) -> list[str | None] | None:
        """The values of a text column, in the order of their first rows; None: that takes reading them."""
        return self._texts.get(column)

    def chunks(self, columns: Sequence[str], operands: Bools | None = None, steps: Bools | None = None) -> Iterator[Chunk]:
        """Rows in order of steps, several parts read at once and no more than a few held.

        Args:
            columns: to read.
            operands, steps: which of them; None: all.
        """
        wanted = [
            (part, kept) for part, runs in self._parts if (kept := [r for r in runs if steps is None or steps[r.step]])
        ]
        unreadable: dict[str, str] = {}
        read = partial(self._chunk, sorted(set(columns)), operands, unreadable)
        yield from filter(None, ahead(read, wanted))
        if unreadable:
            complain_of(self._storage, self._table, unreadable)

    def _chunk(
        self, columns: Sequence[str], operands: Bools | None, unreadable: dict[str, str], of_part: tuple[Part, list[_Run]]
    ) -> Chunk | None:
        part, runs = of_part
        kept = [(run, rows) for run in runs if len(rows := self._rows(run.layout, operands))]
        if not kept:
            return None
        steps = [(run.step, len(rows)) for run, rows in kept]
        layouts = [(self._layouts[run.layout], rows) for run, rows in kept]
        operand = np.concatenate([layout if len(layout) == len(rows) else layout[rows] for layout, rows in layouts])
        if not columns:
            return Chunk(pl.DataFrame(), operand, steps)
        spans = [(run.first + int(rows[0]), run.first + int(rows[-1]) + 1) for run, rows in kept]
        try:
            table, places = _read(self._storage, part, self._table, columns, spans)
            if (read := (part, *columns, spans[0][0], spans[-1][1])) not in self._sound:
                check(table)
                self._sound.add(read)
        except FileNotFoundError:
            raise RecordError(
                f"{self._storage.path(part.path)} is gone: the run goes on and has merged its parts; do the same again"
            ) from None
        except Exception as error:  # every driver has errors of its own
            unreadable[part.path] = reason(error)
            return None
        if len(places) != len(operand) or spans != sorted(spans):
            # The rows of a stretch follow one another in what was read, too.
            begins = np.searchsorted(places, [first for first, _ in spans])
            table = table.take(np.concatenate([at + rows - rows[0] for at, (_, rows) in zip(begins, kept, strict=True)]))
        found = pl.DataFrame(pl.from_arrow(table))
        if pl.Categorical in found.dtypes:
            found = found.with_columns(pl.col(pl.Categorical).cast(pl.String))
        return Chunk(found, operand, steps)

    def _rows(self, layout: int, operands: Bools | None) -> Ints:
        """Places of the rows that are wanted, among those of a stretch."""
        return self._everything[layout] if operands is None else np.flatnonzero(operands[self._layouts[layout]])


def _read(
    storage: Storage, part: Part, table: str, columns: Sequence[str], spans: Sequence[tuple[int, int]]
) -> tuple[pa.Table, Ints]:
    """Columns of the row groups that have the rows of these spans, and the place of each row in the part.

    Raises:
        Exception: the part is not there, or damaged, or foreign.
    """
    schema = arrow_schema(table, columns)
    with storage.open(part.path) as file:
        rows, places = parquet.Rows(file, part.checksum).read(migration.with_earlier_names(schema.names), spans)
    return of_schema(migration.completed(rows, schema), schema), places


class _Index:
    """Where the rows of a table are."""

    def __init__(self, storage: Storage, table: str) -> None:
        self._storage, self._table = storage, table
        self._operand: dict[tuple[str, str], int] = {}
        self._layout: dict[str, int] = {}
        self._outlines: dict[Part, Outline] = {}
        #: int64 [rows]: the operand of each row of a stretch; those of most steps are alike
        self.layouts: list[Ints] = []
        #: by step, the attempt whose rows count, and its part and stretches: step, first row, layout
        self.owner: dict[int, tuple[int, Part, list[tuple[int, int]]]] = {}
        self._add_all()

    @property
    def operands(self) -> list[tuple[str, str]]:
        """Layer, role of each."""
        return list(self._operand)

    def parts(self, steps: Ints) -> list[tuple[Part, list[_Run]]]:
        """The parts with rows that count, in order of steps, with their runs."""
        of_parts = []
        for part, places in itertools.groupby(enumerate(steps.tolist()), lambda each: self.owner[each[1]][1]):
            runs = [_Run(place, *run) for place, step in places for run in self.owner[step][2]]
            of_parts.append((part, runs))
        return of_parts

    def texts(self) -> dict[str, list[str | None]]:
        """Values of text columns, as far as footers tell them of all rows that count, and of no others."""
        parts = [self.owner[step][1] for step in sorted(self.owner)]
        known = [self._outlines[part] for part in dict.fromkeys(parts)]
        if len(parts) != sum(len({stretch.step for stretch in each.stretches}) for each in known):
            return {}  # some rows were trained again
        columns = set.intersection(*(set(each.texts) for each in known)) if known else ()
        return {name: list(dict.fromkeys(value for each in known for value in each.texts[name])) for name in columns}

    def _add_all(self) -> None:
        unreadable: dict[str, str] = {}
        listed: set[Part] = set()
        while new := [part for part in parts_of(self._storage, self._table) if part not in listed]:
            listed.update(new)
            gone = False
            for part, found in zip(new, ahead(self._outline, new), strict=True):
                if isinstance(found, str):
                    unreadable[part.path] = found
                elif found is None:
                    gone = True
                else:
                    self._add(part, found)
            if not gone:
                break  # else a run that goes on has merged it since
        if unreadable:
            complain_of(self._storage, self._table, unreadable)

    def _outline(self, part: Part) -> Outline | str | None:
        """Of a part; what is wrong with it; or None: it is gone."""
        try:
            self._storage.check(part.path)
            with self._storage.open(part.path) as file:
                rows = parquet.Rows(file, part.checksum)
            return rows.outline or Outline(tuple(stretches(_with_plain_names(self._keys(part)))))
        except FileNotFoundError:
            return None
        except Exception as error:  # every driver has errors of its own
            return reason(error)

    def _keys(self, part: Part) -> pa.Table:
        keys = _read(self._storage, part, self._table, _KEYS, [(0, 1 << 62)])[0]
        check(keys)
        return keys

    def _add(self, part: Part, outline: Outline) -> None:
        """A step counts once in an attempt, merged parts first, and of attempts the latest does."""
        runs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        first = 0
        try:
            for stretch in outline.stretches:
                if stretch.digest not in self._layout:
                    self._read_layouts(part, outline.stretches)
                runs[stretch.step].append((first, self._layout[stretch.digest]))
                first += stretch.rows
        except Exception as error:  # the names cannot be read
            complain_of(self._storage, self._table, {part.path: reason(error)})
            return
        for step, of_step in runs.items():
            if step not in self.owner or self.owner[step][0] < part.attempt:
                self.owner[step] = part.attempt, part, of_step
        self._outlines[part] = outline

    def _read_layouts(self, part: Part, outline: Sequence[Stretch]) -> None:
        keys = _with_plain_names(self._keys(part))
        first = 0
        for stretch in outline:
            if stretch.digest not in self._layout:
                names = keys.slice(first, stretch.rows)
                if stretches(names) != [stretch]:
                    raise ValueError("its footer does not fit its rows")
                pairs = zip(names["layer"].to_pylist(), names["role"].to_pylist(), strict=True)
                layout = [self._operand.setdefault(pair, len(self._operand)) for pair in pairs]
                self._layout[stretch.digest] = len(self.layouts)
                self.layouts.append(np.array(layout, dtype=np.int64))
            first += stretch.rows


def _with_plain_names(keys: pa.Table) -> pa.Table:
    return keys.cast(pa.schema([(field.name, pa.int64() if field.name == "step" else pa.string()) for field in keys.schema]))
