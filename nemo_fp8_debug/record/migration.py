"""Translate records of schema 2 and 3 to the names of schema 4. Only this module contains earlier names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: schema versions that this release reads
READABLE = (2, 3, 4)

#: folder of the parts of each table before schema 4
_FOLDERS = {"metrics": "figures", "histograms": "sketches"}
_COLUMNS = {
    "shards": "ranks",
    "shards_missing": "ranks_missing",
    "true_amax": "unscaled_amax",
    "true_amin": "unscaled_amin",
    "true_mse": "unscaled_mse",
    "grad_multiplier": "grad_scale",
}
_EARLIER = {new: old for old, new in _COLUMNS.items()}
_VALUES = {"scale_source": ("not quantised", "not quantized")}
_FINGERPRINT = {
    "host_options": "backend_options",
    "configured_in_host": "configured_in_backend",
    "gemms_quantised_by_emulation": "gemms_quantized_by_emulation",
    "hosts": "backends",
    "weigh": "what_if",
}
#: columns that schema 2 does not have; they are null in older parts
_ADDED = {"experts", "ranks", "ranks_missing", "unscaled_amax", "unscaled_amin", "unscaled_mse", "grad_scale"}


def list_table_folders(table: str) -> Sequence[str]:
    """Return the folders that may contain parts of a table, the current folder first.

    >>> list_table_folders("metrics")
    ['metrics', 'figures']
    """
    return [table, *([_FOLDERS[table]] if table in _FOLDERS else [])]


def add_earlier_column_names(columns: Iterable[str]) -> list[str]:
    """Return names of columns, followed by their earlier names.

    >>> add_earlier_column_names(["step", "ranks"])
    ['step', 'ranks', 'shards']
    """
    return [name for new in columns for name in (new, *([_EARLIER[new]] if new in _EARLIER else []))]


def list_renamed_column_values(column: str) -> list[tuple[str, str]]:
    """Return pairs of an earlier and a current value of a column.

    >>> list_renamed_column_values("scale_source")
    [('not quantised', 'not quantized')]
    """
    return [_VALUES[column]] if column in _VALUES else []


def migrate_rows(rows: pa.Table) -> pa.Table:
    """Convert rows of any readable schema to the current names and values."""
    if not _COLUMNS.keys().isdisjoint(rows.column_names):
        rows = rows.rename_columns([_COLUMNS.get(name, name) for name in rows.column_names])
    for name, (old, new) in _VALUES.items():
        if name in rows.column_names:
            i = rows.column_names.index(name)
            rows = rows.set_column(i, rows.field(i), _with_value(rows.column(i), old, new))
    return rows


def add_missing_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the columns of `schema`, in its order.

    Columns that did not exist when the rows were written become null. Other missing columns stay missing.
    """
    rows = migrate_rows(rows)
    if rows.column_names == schema.names:
        return rows
    found = dict(zip(rows.column_names, rows.columns, strict=True))  # a pyarrow table builds these lists on each access
    columns = {
        field.name: found[field.name] if field.name in found else pa.nulls(len(rows), field.type)
        for field in schema
        if field.name in found or field.name in _ADDED
    }
    return pa.table(columns)


def _with_value(column: pa.ChunkedArray, old: str, new: str) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return pc.replace_substring(column, old, new)
    chunks = [pa.DictionaryArray.from_arrays(c.indices, pc.replace_substring(c.dictionary, old, new)) for c in column.chunks]
    return pa.chunked_array(chunks, column.type)


def migrate_fingerprint(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a fingerprint of any readable schema to the current names.

    >>> migrate_fingerprint({"schema_version": 3, "sampled": {"hosts": ["torch.nn.Linear"]}})
    {'schema_version': 3, 'sampled': {'backends': ['torch.nn.Linear']}}
    """
    return {
        _FINGERPRINT.get(name, name): migrate_fingerprint(value) if isinstance(value, Mapping) else value
        for name, value in content.items()
    }
