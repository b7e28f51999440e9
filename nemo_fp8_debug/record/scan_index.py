"""Where the rows of a table are: which parts have them, and of which operands they are."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ..core.threads import ahead
from . import migration, parquet
from .outline import Outline, Stretch, stretches
from .reader import check, complain_of, of_schema, parts_of, reason
from .schema import Part, arrow_schema, texts_of
from .storage import Storage

Ints = npt.NDArray[np.int64]
_NAMES = ("layer", "role")
_KEYS = ("step", *_NAMES)


@dataclass(frozen=True)
class Run:
    """Rows of one step in a part, one behind the other."""

    #: place among the steps
    step: int
    #: place of the first row in the part
    first: int
    #: of the operands of each row, among the layouts
    layout: int


def read_columns(
    storage: Storage, part: Part, table: str, columns: Sequence[str], spans: Sequence[tuple[int, int]]
) -> tuple[pa.Table, Callable[[Ints], Ints]]:
    """Columns of the row groups that have the rows of these spans, and where places in the part are among them.

    Raises:
        Exception: the part is not there, or damaged, or foreign.
    """
    schema = arrow_schema(table, columns)
    with storage.open(part.path) as file:
        rows, at = parquet.Rows(file, part.checksum, texts_of(schema)).read(
            migration.with_earlier_names(schema.names), spans
        )
    return of_schema(migration.completed(rows, schema), schema), at


class Index:
    """Where the rows of a table are."""

    def __init__(self, storage: Storage, table: str) -> None:
        self._storage, self._table = storage, table
        #: layer, role of each
        self.operands = pl.DataFrame(schema=dict.fromkeys(_NAMES, pl.String))
        self._layout: dict[str, int] = {}
        self._outlines: dict[Part, Outline] = {}
        #: int64 [rows]: the operand of each row of a stretch; those of most steps are alike
        self.layouts: list[Ints] = []
        #: by step, the attempt whose rows count, and its part and stretches: step, first row, layout
        self.owner: dict[int, tuple[int, Part, list[tuple[int, int]]]] = {}
        self._add_all()

    def parts(self, steps: Ints) -> list[tuple[Part, list[Run]]]:
        """The parts with rows that count, in order of steps, with their runs."""
        of_parts = []
        for part, places in itertools.groupby(enumerate(steps.tolist()), lambda each: self.owner[each[1]][1]):
            runs = [Run(place, *run) for place, step in places for run in self.owner[step][2]]
            of_parts.append((part, runs))
        return of_parts

    def outline(self, part: Part) -> Outline:
        """What the footer of a part tells of its rows."""
        return self._outlines[part]

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
        keys = read_columns(self._storage, part, self._table, _KEYS, [(0, 1 << 62)])[0]
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
                self._layout[stretch.digest] = len(self.layouts)
                self.layouts.append(self._places(pl.DataFrame(pl.from_arrow(names.select(_NAMES)))))
            first += stretch.rows

    def _places(self, names: pl.DataFrame) -> Ints:
        """Of each row, the place of its operand; those that are new are added."""
        new = names.unique(maintain_order=True).join(self.operands, on=_NAMES, how="anti", maintain_order="left")
        self.operands = pl.concat([self.operands, new])
        places = names.join(self.operands.with_row_index("place"), on=_NAMES, how="left", maintain_order="left")["place"]
        found: Ints = places.cast(pl.Int64).to_numpy()
        return found


def _with_plain_names(keys: pa.Table) -> pa.Table:
    return keys.cast(pa.schema([(field.name, pa.int64() if field.name == "step" else pa.string()) for field in keys.schema]))
