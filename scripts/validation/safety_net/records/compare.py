"""Compare two records to the last bit: tables, histograms, dumps, events, fingerprints and warnings.

The files are read without the package, so that no change of its readers can hide a difference.
"""

from __future__ import annotations

import fnmatch
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

#: columns of tables that two runs of the same code do not share, and why
EXCLUDED_COLUMNS = {"time": "the clock when a step or an evaluation ended"}
#: fields of JSON files, by their path, and why
EXCLUDED_FIELDS = {
    "time": "the clock",
    "ended": "the clock; whether it is there is compared",
    "waited": "seconds that training waited",
    "versions": "of the installed packages, which are no result",
    "devices": "the machine",
    "sampled/output": "the folder of the record",
    "control/written": "the clock when the control file was written",
}
#: what warnings say of the speed of the machine
_OF_TIME = re.compile(r"waited|hangs|seconds")
_CHECKSUM = re.compile(r"\.[0-9a-f]{8}\.safetensors$")
_PART = re.compile(r"attempt-(\d+)-steps?-(\d+)(?:-(\d+))?-[0-9a-f]+\.parquet")


@dataclass
class Comparison:
    """How one table of two records compares."""

    name: str
    rows: int = 0
    columns: int = 0
    differences: list[str] = field(default_factory=list)

    def print(self, setup: str) -> None:
        """Print one line, and up to three differences."""
        print(f"{setup:32} {self.name:22} {self.rows:6} rows {self.columns:4} columns {len(self.differences):4} differences")
        for difference in self.differences[:3]:
            print(f"    {difference[:300]}")


def compare_folders(before: Path, after: Path, only: list[str]) -> int:
    """Compare two sets of records, print a line for each table, and return 1 if any differs.

    Args:
        before: folder of the one set.
        after: folder of the other.
        only: names or patterns of setups; all if empty.
    """
    there = [{p.name for p in folder.iterdir() if p.is_dir()} for folder in (before, after)]
    chosen = [n for n in sorted(there[0] | there[1]) if not only or any(fnmatch.fnmatch(n, pattern) for pattern in only)]
    found = [(name, one) for name in chosen for one in compare_setups(before / name, after / name)]
    for name, one in found:
        one.print(name)
    wrong = sorted({name for name, one in found if one.differences})
    rows = sum(one.rows for _, one in found)
    print(
        f"{len(chosen)} setups, {len(found)} tables, {rows} rows; {len(wrong)} setups differ: {', '.join(wrong) or 'none'}"
    )
    return int(bool(wrong) or not chosen)


def compare_setups(before: Path, after: Path) -> Iterator[Comparison]:
    """Yield how each table and file of a setup compares.

    Args:
        before: folder of the setup in the one set.
        after: folder of the setup in the other.
    """
    for folder in (before, after):
        if not (folder / "record").is_dir():
            yield Comparison("record", differences=[f"{folder} has no record"])
            return
    records = before / "record", after / "record"
    tables = [{p.parent.relative_to(record).as_posix() for p in record.rglob("*.parquet")} for record in records]
    for table in sorted(tables[0] | tables[1]):
        yield compare_tables(table, *(record / table for record in records))
    yield _compare_items("dumps", *map(_read_dumps, records))
    yield _compare_items("events", *map(_read_events, records))
    yield _compare_items("fingerprint and status", *map(_read_json, records))
    yield _compare_items("warnings", _read_warnings(before), _read_warnings(after))
    yield _compare_items("other files", *map(_list_others, records))


def compare_tables(name: str, before: Path, after: Path) -> Comparison:
    """Compare all rows of a table.

    Args:
        name: of the table.
        before: its folder in the one record.
        after: its folder in the other.
    """
    result = Comparison(name)
    missing = [str(folder) for folder in (before, after) if not list(folder.glob("*.parquet"))]
    if missing:
        result.differences.append(f"{missing[0]} is missing")
        return result
    one, other = read_table(before), read_table(after)
    result.rows, result.columns = one.num_rows, sum(column not in EXCLUDED_COLUMNS for column in one.column_names)
    if one.schema.names != other.schema.names or one.schema.types != other.schema.types:
        result.differences.append(f"columns {_shown_schema(one, other)} against {_shown_schema(other, one)}")
    if one.num_rows != other.num_rows:
        result.differences.append(f"{one.num_rows} against {other.num_rows} rows")
        return result
    for column in one.column_names:
        if column in other.column_names and column not in EXCLUDED_COLUMNS:
            differing = _find_differing(one[column], other[column])
            result.differences += [_describe(one, other, column, row) for row in differing]
    if result.differences and _sort_rows(one) == _sort_rows(other):
        result.differences = ["the same rows in another order"]
    return result


def read_table(folder: Path) -> pa.Table:
    """Read all parts of a table in the order of attempts and steps.

    A part of several steps replaces those of single steps within it, as long as both are there.

    Args:
        folder: of the table.
    """
    parts = []
    for path in folder.glob("*.parquet"):
        found = _PART.fullmatch(path.name)
        if not found:
            raise ValueError(f"{path} is not named as a part of a record is")
        attempt, first, last = int(found[1]), int(found[2]), int(found[3] or found[2])
        parts.append((attempt, first, last, found[3] is not None, path))
    merged = [part for part in parts if part[3]]
    kept = [p for p in parts if p[3] or not any(m[0] == p[0] and m[1] <= p[1] and p[2] <= m[2] for m in merged)]
    return pa.concat_tables([pq.ParquetFile(part[4]).read() for part in sorted(kept)])


def _bits(column: pa.ChunkedArray) -> list[Any]:
    """Return values that are equal only if all bits are, but for NaN, which equals NaN."""
    if pa.types.is_floating(column.type):
        return [None if v is None else "nan" if v != v else struct.pack("<d", v) for v in column.to_pylist()]
    return column.to_pylist()  # type: ignore[no-any-return]


def _find_differing(one: pa.ChunkedArray, other: pa.ChunkedArray) -> list[int]:
    return [row for row, (a, b) in enumerate(zip(_bits(one), _bits(other), strict=True)) if a != b]


def _sort_rows(table: pa.Table) -> list[str]:
    names = sorted(set(table.column_names) - set(EXCLUDED_COLUMNS))
    return sorted(map(repr, zip(*(_bits(table[name]) for name in names), strict=True)))


def _describe(one: pa.Table, other: pa.Table, column: str, row: int) -> str:
    keys = [name for name in ("attempt", "step", "layer", "role", "product", "recipe", "what") if name in one.column_names]
    where = ", ".join(f"{name} {one[name][row].as_py()}" for name in keys)
    return f"{column} at {where}: {one[column][row].as_py()!r} against {other[column][row].as_py()!r}"


def _shown_schema(one: pa.Table, other: pa.Table) -> list[str]:
    theirs = {(f.name, str(f.type)) for f in other.schema}
    return [f"{f.name} {f.type}" for f in one.schema if (f.name, str(f.type)) not in theirs] or ["in another order"]


def _compare_items(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    result = Comparison(name, len(before), 1)
    for key in sorted(before.keys() | after.keys()):
        if key not in before or key not in after:
            result.differences.append(f"{key} is only in {'the second' if key in after else 'the first'}")
        elif before[key] != after[key]:
            result.differences.append(f"{key}: {before[key]!r:.120} against {after[key]!r:.120}")
    return result


def _read_dumps(record: Path) -> dict[str, Any]:
    """Return the header of each tensor that was dumped, and its bytes, from safetensors files."""
    found: dict[str, Any] = {}
    for path in record.rglob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        # The name ends in a checksum of the file, whose header has its fields in an order by chance.
        name = _CHECKSUM.sub("", path.relative_to(record).as_posix())
        found[f"{name}/about"] = _without_excluded(header.pop("__metadata__", {}), "")
        for tensor, about in header.items():
            start, end = about["data_offsets"]
            found[f"{name}/{tensor}"] = about["dtype"], about["shape"], content[8 + length + start : 8 + length + end]
    return found


def _read_events(record: Path) -> dict[str, Any]:
    """Return what TensorBoard's event files hold, by tag, step and number of the value at that step."""
    found: dict[str, Any] = {}
    for path in sorted(record.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                key, number = f"{value.tag} at step {event.step}", 0
                while f"{key}, {number}" in found:
                    number += 1
                found[f"{key}, {number}"] = value.SerializeToString(deterministic=True)
    return found


def _read_json(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in record.glob("*.json"):
        found |= _without_excluded(json.loads(path.read_text()), path.name)
    return found


def _without_excluded(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the values of nested mappings by their path, without the excluded ones."""
    found: dict[str, Any] = {}

    def add(value: Any, path: str) -> None:
        if path == "ended":
            found[f"{file}/ended"] = value is not None
        elif path in EXCLUDED_FIELDS:
            return
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                add(inner, f"{path}/{key}" if path else str(key))
        else:
            found[f"{file}/{path}"] = value

    add(values, "")
    return found


def _read_warnings(setup: Path) -> dict[str, Any]:
    """Return the package's warnings of each rank, without those about time."""
    hidden: Callable[[str], str] = lambda text: text.replace(str(setup.resolve()), "FOLDER")  # noqa: E731
    return {
        path.name: [hidden(text) for text in json.loads(path.read_text()) if not _OF_TIME.search(text)]
        for path in setup.glob("warnings-*.json")
    }


def _list_others(record: Path) -> dict[str, Any]:
    """Return the names of files that no other part of the comparison reads."""
    known = (".parquet", ".safetensors", ".json")
    others = (p for p in record.rglob("*") if p.is_file() and p.suffix not in known and "tfevents" not in p.name)
    return {path.relative_to(record).as_posix(): path.name for path in others}
