"""What is read from the files of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from ...record import migration, parquet
from ...record.outline import Outline
from ...record.reader import check, read_part
from ...record.scan_index import read_columns
from ...record.schema import SCHEMAS, Part, arrow_schema
from ...record.storage import Storage
from ..web.errors import NotReadable
from .part_index import WHAT_IF, Array, Tensors, coded, numbers_in

T = TypeVar("T")

#: how many values are not finite: two columns as one
NONFINITE = "nonfinite"


class Gone(Exception):
    """A part was merged into another since it was listed."""


def columns(run: Storage, table: str, part: Part, *names: str) -> pa.Table:
    """Columns of a part, all its rows.

    Raises:
        Gone: it is there no more.
        NotReadable: it is damaged.
    """
    rows = _read(part, lambda: read_part(run, arrow_schema(table, {"attempt", *names}), part))
    if isinstance(rows, str):
        raise NotReadable(f"{part.path} cannot be read: {rows}.")
    return rows


def some_rows(run: Storage, table: str, part: Part, names: Sequence[str], places: Sequence[int]) -> pa.Table:
    """Columns of a few rows of a part, of which no more than the row groups around them are decoded.

    Raises:
        Gone, NotReadable: as for `columns`.
    """

    def read() -> pa.Table:
        run.check(part.path)
        rows = np.array(places)
        spans = [(int(span[0]), len(span)) for span in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)]
        groups, at = read_columns(run, part, table, names, [(first, first + length) for first, length in spans])
        # Slices: `take` would ask pandas what its places are, and import it for that.
        begins = at(np.array([first for first, _ in spans])).tolist()
        found = pa.concat_tables(groups.slice(begin, length) for begin, (_, length) in zip(begins, spans, strict=True))
        check(found)
        return found

    return _read(part, read)


def whole_rows(run: Storage, table: str, part: Part, places: Sequence[int], at_once: int) -> list[dict[str, Any]]:
    """All columns of a few rows of a part, ascending, of which some are decoded at a time.

    Raises:
        Gone, NotReadable: as for `columns`.
    """
    names = list(SCHEMAS[table])

    def read() -> pa.Table:
        run.check(part.path)
        with run.open(part.path) as file:
            rows = migration.renamed(parquet.pick(file, part.checksum, migration.with_earlier_names(names), places, at_once))
        check(rows)
        return rows

    return [{name: row.get(name) for name in names} for row in _read(part, read).to_pylist()]


def outline(run: Storage, part: Part) -> Outline | None:
    """What the footer of a part tells of its rows; None: nothing, an earlier release wrote it.

    Raises:
        Gone, NotReadable: as for `columns`.
    """

    def read() -> Outline | None:
        run.check(part.path)
        with run.open(part.path) as file:
            return parquet.Rows(file, part.checksum).outline

    return _read(part, read)


def first_tensors(run: Storage, table: str, part: Part, rows: int) -> Tensors:
    """Of the first rows of a part.

    Raises:
        Gone, NotReadable: as for `columns`.
    """
    found = some_rows(run, table, part, ("layer", "role"), range(rows))
    (layer, layers), (role, roles) = coded(found["layer"]), coded(found["role"])
    return Tensors((layers[i], roles[j]) for i, j in zip(layer.tolist(), role.tolist(), strict=True))


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


def is_tried(run: Storage, table: str, part: Part) -> Array:
    """bool [rows]: which rows are of what-if recipes."""
    codes, known = coded(columns(run, table, part, "scale_source")["scale_source"])
    return codes == known.index(WHAT_IF) if WHAT_IF in known else np.zeros(len(codes), bool)


def _read(part: Part, read: Callable[[], T]) -> T:
    try:
        return read()
    except FileNotFoundError:
        raise Gone from None
    except Exception as error:  # of parquet's and of every driver's own
        raise NotReadable(f"{part.path} cannot be read: {error}.") from None
