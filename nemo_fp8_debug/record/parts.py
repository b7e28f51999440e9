"""The only reader of parts. It lists a table's parts, decides which rows count, and reads columns and rows.

Three rules decide which rows count:

* In an attempt, we read a step's rows from one part only, and from a merged part if there is one. A process that is killed
  while merging leaves both the merged part and the single parts. Tables that several processes write to (`SHARED`) are an
  exception: all parts of a step count.
* If several attempts trained a step, the rows of the latest attempt count.
* We ignore a part that is damaged, that we did not write, or whose rows belong to another attempt than the one in its name.
  One warning names the part.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import warn
from . import migration, parquet
from .outline import PartOutline, list_rows_by_step
from .schema import SCHEMAS, TABLES, Part, list_text_columns, make_arrow_schema
from .storage import FolderStorage

#: columns that identify a row
_NAMES = ("attempt", "step", "layer", "role", "product", "what", "name")
#: smallest and largest valid values of metrics; rounded values may exceed these limits slightly
_WITHIN = {"underflow_pct": (0.0, 100.0), "overflow_pct": (0.0, 100.0), "cosine": (-1.0, 1.0), "amax": (0.0, np.inf)}
_ROUNDING = 1e-6
#: largest number of characters of a value that a message shows
_SHOWN = 40
#: number of magnitudes of a 16-bit value, and the formats that histograms may have
MAGNITUDES = 1 << 15
HISTOGRAMS = {"dtype": ("bfloat16", "float16"), "format": ("e4m3", "e5m2", "e2m1", "bf16", "fp16")}


def wrong_values(rows: pa.Table) -> str | None:
    """Describe which values of a part are invalid. Return None if all are valid.

    Args:
        rows: some of the part's columns. Text columns may be dictionaries.

    Example:
        >>> import pyarrow as pa
        >>> wrong_values(pa.table({"step": [0, -3], "layer": ["fc1", "fc1"]}))
        'step is negative'
    """
    for name in rows.column_names:
        if said := _wrong_column(name, rows[name]):
            return f"{name} {said}"
    if {"bins", "counts"} <= set(rows.column_names):
        return _wrong_kind(rows) or _wrong_histograms(rows["bins"].combine_chunks(), rows["counts"].combine_chunks())
    return None


def _wrong_column(name: str, column: pa.ChunkedArray) -> str | None:
    if name in _NAMES and column.null_count:
        return "is missing in some rows"
    if pa.types.is_integer(column.type):
        least = pc.min(column).as_py()
        return "is negative" if least is not None and least < 0 else None
    if name in _WITHIN:
        low, high = _WITHIN[name]
        if not (_are_within(column, low, high) or _are_within(column.filter(pc.is_finite(column)), low, high)):
            return f"is not between {low:g} and {high:g}"
    return None


def _are_within(values: pa.ChunkedArray, low: float, high: float) -> bool:
    extremes = pc.min_max(values)
    least, most = extremes["min"].as_py(), extremes["max"].as_py()
    return least is None or low - _ROUNDING <= least <= most <= high + _ROUNDING


def _wrong_kind(rows: pa.Table) -> str | None:
    for name, known in HISTOGRAMS.items():
        if name in rows.column_names and (unknown := set(pc.unique(rows[name]).to_pylist()) - set(known)):
            return f"{name} is {str(min(unknown, key=str))[:_SHOWN]!r}; it can be {', '.join(known)}"
    return None


def _wrong_histograms(bins: pa.ListArray, counts: pa.ListArray) -> str | None:
    lengths = pc.list_value_length(bins)
    if bins.null_count or counts.null_count or not lengths.equals(pc.list_value_length(counts)):
        return "bins and counts differ in length"
    places, numbers = bins.flatten(), counts.flatten()
    if places.null_count or numbers.null_count:
        return "bins or counts lack values"
    if not len(places):
        return None
    at = places.to_numpy().astype(np.int64)
    if at.max() >= MAGNITUDES:
        return f"bins reach {at.max()}; must be below {MAGNITUDES}"
    if not np.isin(np.flatnonzero(np.diff(at) <= 0) + 1, np.cumsum(lengths.to_numpy())).all():
        return "bins do not ascend"
    return "counts is negative" if pc.min(numbers).as_py() < 0 else None


Ints = npt.NDArray[np.int64]
T = TypeVar("T")
Each = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

#: tables in which several processes may add rows of the same step
SHARED = tuple(table.name for table in TABLES.values() if table.is_added_later)
#: columns that identify a row of an operand
KEYS = ("step", "layer", "role")


class PartGoneError(Exception):
    """The part was merged into another part after it was listed."""


class PartDamagedError(Exception):
    """The part cannot be read. The message gives the reason in one line."""


def list_parts_in_folder(run: FolderStorage, folder: str) -> list[Part]:
    """Return the parts in a folder of a record, by file name."""
    return [part for name in run.list_names(folder) if (part := Part.parse_part_name(folder, name))]


def list_parts_of_table(run: FolderStorage, table: str) -> list[Part]:
    """Return the parts of a table, merged parts first. Warn about files that are not named like parts."""
    parts = []
    for folder in migration.list_table_folders(table):
        for name in run.list_names(folder):
            if part := Part.parse_part_name(folder, name):
                parts.append(part)
            elif not name.endswith(".part"):  # a process was killed while it wrote this file
                warn(f"{run.path(f'{folder}/{name}')} is skipped: it is not named like a part")
    return sorted(parts, key=lambda part: not part.merged)


def order_merged_parts_first(parts: Iterable[Part]) -> list[Part]:
    """Order parts so that a merged part comes before the parts that it replaces."""
    return sorted(parts, key=lambda part: (not part.merged, part.first - part.last))


def order_newest_parts_first(parts: Iterable[Part]) -> list[Part]:
    """Sort parts by attempt, then by steps, latest first. A merged part precedes a single part of the same steps."""
    return sorted(parts, key=lambda part: (part.attempt, part.last, part.merged), reverse=True)


def may_contain_step(table: str, part: Part, step: int) -> bool:
    """Return whether a part may contain rows of a step, judging by its name. In tables without layers, any part may contain
    them.
    """
    return "layer" not in SCHEMAS[table] or part.first <= step <= part.last


class EffectiveParts:
    """Decides, for each step, which part's rows count. Add parts in order.

    Example:
        >>> names = [f"attempt-0-{steps}-00000000.parquet" for steps in ("step-5", "steps-0-9")]
        >>> single, merged = (Part.parse_part_name("metrics", name) for name in names)
        >>> owners = EffectiveParts("metrics")
        >>> owners.add_part(merged, {0, 5, 9}) == {0, 5, 9}, owners.is_redundant(single), owners.add_part(single, {5})
        (True, True, set())
    """

    def __init__(self, table: str) -> None:
        self._is_shared = table in SHARED
        #: steps that were added, by attempt
        self._steps: dict[int, set[int]] = defaultdict(set)
        #: first added part of the latest attempt, by step
        self.of_step: dict[int, Part] = {}

    def is_redundant(self, part: Part) -> bool:
        """Return True if a part is not merged, and another part of its attempt already has its step."""
        return not self._is_shared and not part.merged and part.first in self._steps[part.attempt]

    def add_part(self, part: Part, steps: Collection[int]) -> set[int]:
        """Add a part. Return the steps that no earlier part of the same attempt has."""
        known = self._steps[part.attempt]
        new = set(steps) if self._is_shared else set(steps) - known
        known |= new
        for step in new:
            if step not in self.of_step or self.of_step[step].attempt < part.attempt:
                self.of_step[step] = part
        return new

    def is_latest_part_of_step(self, part: Part, step: int) -> bool:
        """Return whether the part belongs to the latest attempt that contains the step."""
        return self.of_step[step].attempt <= part.attempt


def read_effective_parts(
    run: FolderStorage,
    table: str,
    read: Callable[[Part], T],
    use: Callable[[Part, T], None],
    owners: EffectiveParts,
    parts: Sequence[Part] | None = None,
    each: Each = map,
) -> dict[str, str]:
    """Read each part whose rows may count. If the run has merged parts meanwhile, list the parts again.

    Args:
        read: function that reads a part. It may raise `PartGoneError` or `PartDamagedError`.
        use: function that takes a part and the result of `read`, and adds the part to `owners`. It may raise the same
            errors.
        parts: parts to read first, or None for all parts of the table.
        each: function like `map` that calls `read` for several parts and yields the results in order.

    Returns:
        The reason for ignoring each ignored part, by path.
    """

    def tried(part: Part) -> T | Exception:
        try:
            return read(part)
        except (PartGoneError, PartDamagedError) as error:
            return error

    damaged, listed = dict[str, str](), set[Part]()
    new = list_parts_of_table(run, table) if parts is None else list(parts)
    while new:
        listed.update(new)
        is_any_gone = False
        for is_merged in (True, False):
            left = [part for part in new if part.merged == is_merged and not owners.is_redundant(part)]
            for part, found in zip(left, each(tried, left), strict=True):
                try:
                    if isinstance(found, Exception):
                        raise found
                    use(part, found)
                except PartGoneError:
                    is_any_gone = True
                except PartDamagedError as error:
                    damaged[part.path] = str(error)
        new = [part for part in list_parts_of_table(run, table) if part not in listed] if is_any_gone else []
    return damaged


def warn_of_damaged_parts(run: FolderStorage, table: str, damaged: Mapping[str, str]) -> None:
    """Warn once for all damaged parts, because a bad disk can damage very many.

    Args:
        damaged: the damage of each part in words, by path.
    """
    if damaged:
        (name, why), *others = damaged.items()
        more = f"; {len(others)} other parts are left out too" if others else ""
        warn(f"{run.path(name)} is left out, because it cannot be read as a part of {table}: {why}{more}")


def format_error_in_one_line(error: Exception) -> str:
    """Describe in one line why something cannot be read."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextlib.contextmanager
def open_part(
    run: FolderStorage, part: Part, texts: Sequence[str] = (), whole: bool = False
) -> Iterator[parquet.OpenPartFile]:
    """Open a part.

    Args:
        texts: text columns to read as dictionaries.
        whole: whether to read a remote part whole, in one request.

    Raises:
        PartGoneError: the part does not exist.
        PartDamagedError: the part is damaged or foreign.
    """
    try:
        with (run.open_file_in_one_request if whole else run.open)(part.path) as file:
            yield parquet.OpenPartFile(file, part.checksum, texts)
    except PartDamagedError:
        raise
    except FileNotFoundError:
        raise PartGoneError(part.path) from None
    except Exception as error:  # parquet and every driver have their own errors
        raise PartDamagedError(format_error_in_one_line(error)) from None


def read_part_outline(run: FolderStorage, table: str, part: Part) -> PartOutline:
    """Read the description of a part's rows from the part's footer (the outline). If an earlier release wrote the part
    without an outline, make an outline from steps and names.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    with open_part(run, part) as rows:
        if outline := rows.outline:
            if outline.same.get("attempt", part.attempt) != part.attempt:
                raise PartDamagedError(_OTHER_ATTEMPT)
            return outline
        count = rows.count
    return PartOutline(tuple(list_rows_by_step(read_row_keys(run, table, part, [(0, count)])[0])))


def read_row_keys(run: FolderStorage, table: str, part: Part, spans: Sequence[tuple[int, int]]) -> list[pa.Table]:
    """Read step, layer and role of the rows of each span, as numbers and plain strings.

    Args:
        spans: pairs of a first row and the row after the last, ascending.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    found = _read_spans(run, table, part, KEYS, spans)
    schema = pa.schema([(name, pa.int64() if name == "step" else pa.string()) for name in KEYS])
    return [rows.cast(schema) for rows in found]


def read_part_steps(run: FolderStorage, table: str, part: Part) -> set[int]:
    """Read the steps of a part.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    return list_steps_of_rows(read_part_columns(run, table, part, ("attempt", "step"))[0])


def list_steps_of_rows(rows: pa.Table) -> set[int]:
    """Return the steps of some rows."""
    return set(pc.unique(rows["step"]).to_pylist()) if len(rows) else set()


def read_part_columns(
    run: FolderStorage,
    table: str,
    part: Part,
    columns: Iterable[str],
    spans: Sequence[tuple[int, int]] | None = None,
    step: int | None = None,
) -> tuple[pa.Table, Callable[[Ints], Ints]]:
    """Read some columns of a part, from the row groups that contain the wanted rows.

    Args:
        columns: names of columns. Text columns are returned as dictionaries.
        spans: pairs of a first row and the row after the last, or None for all rows.
        step: read only row groups that may have rows of this step, and ignore `spans`. None reads the rows in `spans`.

    Returns:
        The rows with columns in the schema's order, and a function that converts indices of rows in the part to indices in
        the result.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    schema = make_arrow_schema(table, columns)
    with open_part(run, part, list_text_columns(schema)) as rows:
        spans = rows.find_row_groups(step) if step is not None else spans
        found, at = rows.read_wanted_row_groups(migration.add_earlier_column_names(schema.names), spans)
        return _checked(migration.add_missing_columns(found, schema), schema, part), at


def read_part_rows(run: FolderStorage, table: str, part: Part, columns: Iterable[str], places: Sequence[int]) -> pa.Table:
    """Read columns of a few rows of a part, in ascending order. Decode only the row groups that contain these rows.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    rows = np.array(places)
    spans = [(int(span[0]), int(span[-1]) + 1) for span in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)]
    return pa.concat_tables(_read_spans(run, table, part, columns, spans))


def _read_spans(
    run: FolderStorage, table: str, part: Part, columns: Iterable[str], spans: Sequence[tuple[int, int]]
) -> list[pa.Table]:
    """Read columns of the rows of each span. Use slices, because `take` would import pandas."""
    found, at = read_part_columns(run, table, part, columns, spans)
    begins = at(np.array([first for first, _ in spans])).tolist()
    return [found.slice(begin, end - first) for begin, (first, end) in zip(begins, spans, strict=True)]


def read_whole_rows(run: FolderStorage, table: str, part: Part, places: Sequence[int], at_once: int) -> list[dict[str, Any]]:
    """Read all columns of a few rows of a part, in ascending order. Decode a limited number of rows at a time.

    Raises:
        PartGoneError, PartDamagedError: as for `open_part`.
    """
    names = list(SCHEMAS[table])
    with open_part(run, part) as rows:
        found = migration.migrate_rows(rows.read_few_rows(migration.add_earlier_column_names(names), places, at_once))
        reject_impossible_values(found)
    return [{name: row.get(name) for name in names} for row in found.to_pylist()]


def read_row_groups(run: FolderStorage, table: str, part: Part, whole: bool = False) -> Iterator[pa.Table]:
    """Yield all columns of a part in the current schema, one row group at a time.

    Args:
        whole: whether to read a remote part whole, in one request.

    Raises:
        PartGoneError: as for `open_part`.
        PartDamagedError: as for `open_part`, and if a later release wrote the part.
    """
    schema = make_arrow_schema(table)
    with open_part(run, part, whole=whole) as rows:
        for group in rows.read_row_groups():
            if set(group.column_names) - set(migration.add_earlier_column_names(schema.names)):
                raise PartDamagedError("it has columns from a later release")
            yield _checked(migration.add_missing_columns(group, schema), schema, part).cast(schema)


def read_part_size(run: FolderStorage, part: Part) -> int:
    """Return the size of a part in bytes, or 0 if it cannot be read."""
    with contextlib.suppress(Exception), run.open(part.path) as file:  # every driver has its own errors
        return int(file.seek(0, io.SEEK_END))
    return 0


def count_table_rows(run: str | os.PathLike[str], table: str, enough: float = math.inf) -> int:
    """Count the rows in a table's parts. Read only footers, and stop counting at `enough` rows."""
    run, rows = FolderStorage(run), 0
    for part in list_parts_of_table(run, table):
        if rows >= enough:
            break
        with contextlib.suppress(PartGoneError, PartDamagedError), open_part(run, part) as opened:
            rows += opened.count
    return rows


_OTHER_ATTEMPT = "its rows do not belong to the attempt in its name"


def _checked(rows: pa.Table, schema: pa.Schema, part: Part) -> pa.Table:
    kinds = [column.type for column in rows.schema]
    if [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds] != schema.types:
        raise PartDamagedError("its columns do not match this table")
    reject_impossible_values(rows)
    if "attempt" in rows.column_names and pc.unique(rows["attempt"]).to_pylist() not in ([], [part.attempt]):
        raise PartDamagedError(_OTHER_ATTEMPT)
    return rows


def reject_impossible_values(rows: pa.Table) -> None:
    """Reject rows with values that no run can write.

    Raises:
        PartDamagedError: a row has such a value.
    """
    if wrong := wrong_values(rows):
        raise PartDamagedError(wrong)
