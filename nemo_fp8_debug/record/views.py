"""SQL views over a record's Parquet parts for DuckDB and Spark. They return the same rows as `read_record`.

The views select the rows that count, by the rules in `parts`. They also translate the names of folders, columns and values
in earlier releases.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..errors import ConfigError
from . import migration
from .parts import SHARED, list_parts_in_folder
from .reader import find_record, read_fingerprint
from .schema import SCHEMAS
from .storage import FolderStorage

#: glob that matches files of parts, but no unfinished or foreign files
_PARTS = "attempt-*-step*-*.parquet"
_TYPES = {
    pl.Boolean: "BOOLEAN",
    pl.UInt16: "INTEGER",
    pl.Int32: "INTEGER",
    pl.Int64: "BIGINT",
    pl.Float64: "DOUBLE",
}


@dataclass(frozen=True)
class _Engine:
    """The parts of SQL syntax that differ between engines."""

    create: str
    quote: str
    text: str
    list_of: str


_ENGINES = {
    "duckdb": _Engine("CREATE OR REPLACE VIEW", '"', "VARCHAR", "{}[]"),
    "spark": _Engine("CREATE OR REPLACE TEMPORARY VIEW", "`", "STRING", "ARRAY<{}>"),
}
ENGINES = tuple(_ENGINES)

#: the rule of `parts.EffectiveParts` in SQL: read the rows of a step from one part, a merged part if there is one; among
#: several parts, read the first by folder and name
_PLACE = """concat(
    CASE WHEN regexp_extract(file, '([^/]+)$', 1) LIKE 'attempt-%-steps-%' THEN '0' ELSE '1' END,
    CASE WHEN regexp_extract(file, '([^/]+)/[^/]+$', 1) = '{table}' THEN '0' ELSE '1' END,
    regexp_extract(file, '([^/]+)$', 1))"""

_VIEW = """{create} {table} AS
WITH placed AS (
  SELECT *, {place} AS place
  FROM {table}_files),
samples AS (SELECT attempt, step, min(place) AS place FROM placed GROUP BY attempt, step),
latest AS (SELECT attempt, step, place, max(attempt) OVER (PARTITION BY step) AS newest FROM samples)
SELECT
  {columns}
FROM placed JOIN latest ON placed.attempt = latest.attempt AND placed.step = latest.step AND {same_place}
WHERE latest.attempt = latest.newest;"""

#: keeps one row if a recipe was replayed twice, because each replay writes its own parts; exact rows take precedence over
#: rounded rows
_ONCE = """{create} {table} AS
SELECT {names} FROM (
  SELECT *, row_number() OVER (PARTITION BY step, layer, role, recipe ORDER BY rounded NULLS FIRST) AS nth FROM {table}_all)
WHERE nth = 1;"""


def sql_views(address: str | os.PathLike[str], engine: str = "duckdb") -> str:
    """Return statements that make a view of each table of a record, with the rows of `read_record`.

    Args:
        address: the record, or a folder above it. A path or any fsspec address that the engine can read too.
        engine: "duckdb" or "spark".

    Returns:
        SQL with a few statements for each table. Each statement ends with a semicolon and a line break.

    Raises:
        RecordError: there is no record, or a release with another schema wrote it.
        ConfigError: the engine is unknown.

    Example:
        >>> import duckdb
        >>> lake = duckdb.connect()
        >>> _ = lake.execute(sql_views("runs/bad"))
        >>> lake.sql("SELECT count(*), max(step) FROM metrics WHERE role = 'weight'").fetchall()
        [(144, 110)]
    """
    if engine not in _ENGINES:
        raise ConfigError(f"engine is {engine!r}; use {' or '.join(_ENGINES)}")
    run = find_record(address)
    read_fingerprint(run)
    return "\n".join(statement for table in SCHEMAS for statement in _statements(run, table, engine)) + "\n"


def _statements(run: FolderStorage, table: str, engine: str) -> list[str]:
    spelled = _ENGINES[engine]
    folders = [name for name in migration.list_table_folders(table) if list_parts_in_folder(run, name)]
    names = {"create": spelled.create, "table": table}
    if not folders:
        return [f"{spelled.create} {table} AS\n{_no_rows(spelled, _columns(table, spelled))};"]
    files = (_duckdb_files if engine == "duckdb" else _spark_files)(run, table, folders)
    columns = ",\n  ".join(f"{_todays(name, spelled)} AS {_quoted(name, spelled)}" for name in SCHEMAS[table])
    view = {**names, "place": _PLACE.format(table=table), "columns": columns}
    if table not in SHARED:
        return [*files, _VIEW.format(**view, same_place="placed.place = latest.place")]
    whole = _VIEW.format(**view, same_place="placed.place >= latest.place")
    whole = whole.replace(f"{spelled.create} {table} AS", f"{spelled.create} {table}_all AS", 1)
    return [*files, whole, _ONCE.format(**names, names=", ".join(_quoted(name, spelled) for name in SCHEMAS[table]))]


def _duckdb_files(run: FolderStorage, table: str, folders: Sequence[str]) -> list[str]:
    spelled = _ENGINES["duckdb"]
    # Escape * and [ in a folder's name, so that they are not patterns.
    paths = [re.sub(r"([*?\[])", r"[\1]", f"{run}/{folder}") for folder in folders]
    found = ", ".join(_literal(f"{path}/{_PARTS}") for path in paths)
    columns = _no_rows(spelled, _columns(table, spelled, earlier=True))
    read = f"SELECT * RENAME (filename AS file) FROM read_parquet([{found}], union_by_name = true, filename = true)"
    return [f"{spelled.create} {table}_files AS\n{columns}\nUNION ALL BY NAME\n{read};"]


def _spark_files(run: FolderStorage, table: str, folders: Sequence[str]) -> list[str]:
    spelled = _ENGINES["spark"]
    columns = ", ".join(f"{name} {kind}" for name, kind in _columns(table, spelled, earlier=True))
    address = re.sub(r"^s3://", "s3a://", str(run))
    made, selected = [], []
    for folder in folders:
        path = re.sub(r"([*?\[\]{}\\])", r"\\\1", f"{address}/{folder}")
        options = f"path {_literal(path, escaped=True)}, pathGlobFilter {_literal(_PARTS)}"
        made.append(f"{spelled.create} {table}_in_{folder} ({columns})\nUSING parquet OPTIONS ({options});")
        selected.append(f"SELECT *, input_file_name() AS file FROM {table}_in_{folder}")
    return [*made, f"{spelled.create} {table}_files AS\n" + "\nUNION ALL\n".join(selected) + ";"]


def _columns(table: str, spelled: _Engine, earlier: bool = False) -> list[tuple[str, str]]:
    """Return quoted names and types of a table's columns, optionally including names of earlier schemas."""
    found = []
    for name, kind in SCHEMAS[table].items():
        for each in migration.add_earlier_column_names([name]) if earlier else [name]:
            found.append((_quoted(each, spelled), _type(kind, spelled)))
    return found


def _todays(name: str, spelled: _Engine) -> str:
    """Return an SQL expression that reads a column under its current or any earlier name, and converts to current values."""
    names = [f"placed.{_quoted(each, spelled)}" for each in migration.add_earlier_column_names([name])]
    value = f"coalesce({', '.join(names)})" if len(names) > 1 else names[0]
    for old, new in migration.list_renamed_column_values(name):
        value = f"replace({value}, {_literal(old)}, {_literal(new)})"
    return value


def _no_rows(spelled: _Engine, columns: Sequence[tuple[str, str]]) -> str:
    return f"SELECT {', '.join(f'CAST(NULL AS {kind}) AS {name}' for name, kind in columns)} WHERE 1 = 0"


def _type(kind: Any, spelled: _Engine) -> str:
    if isinstance(kind, pl.List):
        return spelled.list_of.format(_type(kind.inner, spelled))
    return spelled.text if kind == pl.String else _TYPES[kind]


def _quoted(name: str, spelled: _Engine) -> str:
    return f"{spelled.quote}{name}{spelled.quote}"


def _literal(text: str, escaped: bool = False) -> str:
    """Return a string as a SQL literal.

    Args:
        escaped: whether the engine treats a backslash as an escape, like Spark.
    """
    if escaped:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "'" + text.replace("'", "''") + "'"
