"""The tables of a run record, and the file names of its parts. docs/record.md describes the columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ..core.keys import STEP_SCALARS as STEP_SCALARS
from ..core.table import Table, load_feature_modules

#: file with the status of the run: its control settings, its dumps, and whether the run has ended
STATUS = "status.json"
VERSION = 4
#: sections of a fingerprint; each section is a mapping
SECTIONS = (
    *("versions", "devices", "environment", "recipe", "torchao", "backend_options", "risky_features_on", "model"),
    *("sampled", "coverage", "imported"),
)

_ARROW = {
    "boolean": pa.bool_(),
    "uint16": pa.uint16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "list[uint16]": pa.list_(pa.uint16()),
    "list[int64]": pa.list_(pa.int64()),
}

_POLARS: dict[str, Any] = {name: pl.Series(pa.nulls(0, kind)).dtype for name, kind in _ARROW.items()}

#: schemas of all tables by name, in the order of the record
TABLES: dict[str, Table] = {table.name: table for module in load_feature_modules("table") for table in module.TABLES}
#: polars type of each column, by table and column
SCHEMAS: dict[str, dict[str, Any]] = {
    name: {column: _POLARS[kind] for column, kind in table.columns.items()} for name, table in TABLES.items()
}


def make_arrow_table(table: str, columns: Mapping[str, Any]) -> pa.Table:
    """Return columns as a table with the schema of `table`.

    Missing columns become null, and columns that are not in the schema are left out.
    """
    rows = len(next(iter(columns.values())))
    schema = make_arrow_schema(table)
    return pa.table([_array(columns.get(field.name), field.type, rows) for field in schema], schema=schema)


def _array(values: Sequence[Any] | None, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    # Do not pass a list of arrays to pyarrow, which would convert it value by value and load pandas.
    absent, arrays = [array is None for array in values], [() if array is None else array for array in values]
    ends, dtype = np.cumsum([0, *map(len, arrays)], dtype=np.int32), kind.value_type.to_pandas_dtype()
    flat = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
    mask = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), kind, mask=mask)


def make_arrow_schema(table: str, columns: Iterable[str] | None = None) -> pa.Schema:
    """Return the schema of `table`, or of some of its columns, as parts store them."""
    kept = None if columns is None else set(columns)
    return pa.schema([(c, _ARROW[kind]) for c, kind in TABLES[table].columns.items() if kept is None or c in kept])


def list_text_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the text columns."""
    return [field.name for field in schema if field.type == pa.string()]


# Limit the digits to numbers that the columns can represent.
_PART = re.compile(r"attempt-(\d{1,9})-steps?-(\d{1,18})(?:-(\d{1,18}))?-([0-9a-f]{8})\.parquet")
_FINGERPRINT = re.compile(r"attempt-(\d{1,9})\.json")


@dataclass(frozen=True)
class Part:
    """The fields of a part's file name."""

    folder: str
    name: str
    attempt: int
    first: int
    last: int
    checksum: str
    #: whether the part is the result of a merge
    merged: bool

    @property
    def path(self) -> str:
        """Return the path below the record's folder."""
        return f"{self.folder}/{self.name}"

    @classmethod
    def make_part_name(cls, folder: str, attempt: int, first: int, last: int | None, checksum: str) -> Part:
        """Return the part of one step, or a merged part of several steps if `last` is given.

        Example:
            >>> Part.make_part_name("metrics", 0, 120, None, "9f3c02d1").path
            'metrics/attempt-0-step-00000120-9f3c02d1.parquet'
        """
        steps = f"step-{first:08d}" if last is None else f"steps-{first:08d}-{last:08d}"
        name = f"attempt-{attempt}-{steps}-{checksum}.parquet"
        return cls(folder, name, attempt, first, first if last is None else last, checksum, last is not None)

    @classmethod
    def parse_part_name(cls, folder: str, name: str) -> Part | None:
        """Parse the name of a file in a folder of the record. Return None if the name is not valid for a part."""
        found = _PART.fullmatch(name)
        if not found:
            return None
        attempt, first, last, checksum = found.groups()
        return cls(folder, name, int(attempt), int(first), int(last or first), checksum, last is not None)


def parse_attempt_number(name: str) -> int | None:
    """Return the number of the attempt from a fingerprint's file name. Return None if the name is not valid for a
    fingerprint.
    """
    found = _FINGERPRINT.fullmatch(name)
    return int(found[1]) if found else None
