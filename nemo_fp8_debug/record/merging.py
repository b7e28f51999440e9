"""Merge many small parts into few large parts, so that reading all steps does not open thousands of files.

While a run goes on, `PartMerger` merges every `MERGED` parts into one. It merges every `MERGED` merged parts again, up to
`LARGEST` bytes. `compact` merges a finished record, and may drop histograms. We write a new part before we remove the parts
that it replaces, and readers count each step once. So nothing is lost or counted twice if the process is killed in between.

We keep the new part in memory, and one row group of the old parts at a time. We read remote parts whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError, RecordError
from . import parquet
from .parts import (
    SHARED,
    EffectiveParts,
    PartDamagedError,
    PartGoneError,
    count_table_rows,
    list_parts_in_folder,
    order_merged_parts_first,
    read_part_size,
    read_part_steps,
    read_row_groups,
)
from .reader import find_record, read_fingerprint, read_status, read_step_scalars, read_table_rows
from .schema import SCHEMAS, STATUS, TABLES, Part, make_arrow_schema, parse_attempt_number
from .storage import FolderStorage

#: number of parts that are merged into one
MERGED = 64
#: size in bytes at which parts are no longer merged
LARGEST = 64 << 20
#: least number of rows in a row group, unless the whole part has fewer
_GROUP = 1 << 17
#: tables that are read step by step, so each row group has the rows of one step only
_BY_STEP = tuple(table.name for table in TABLES.values() if table.by_step)
#: names of the tables of histograms
HISTOGRAMS = tuple(table.histograms for table in TABLES.values() if table.histograms)
#: tables with one writer per attempt, which merging during a run requires
_MERGED_TABLES = tuple(table for table in TABLES if table not in SHARED)


@dataclass(frozen=True)
class WrittenPartInfo:
    """A part, its size in bytes, and the steps whose rows in this part count. None means all steps."""

    part: Part
    size: int
    steps: frozenset[int] | None = None


class _UnreadableError(Exception):
    """A part cannot be read to its end."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.path)
        self.part = part


class PartMerger:
    """Merges the parts of one attempt as they are written, and the parts of earlier attempts once."""

    def __init__(self, storage: FolderStorage) -> None:
        self._storage = storage
        #: parts that wait to be merged, by table and by how often they were merged already
        self._waiting: dict[tuple[str, int], list[WrittenPartInfo]] = defaultdict(list)

    def add_written_part(self, table: str, written: WrittenPartInfo, times: int = 0) -> None:
        """Note a part that was written, and merge parts that are due.

        Args:
            times: how often the part's rows were merged before.
        """
        if table not in _MERGED_TABLES or written.size >= LARGEST // 2:
            return
        waiting = self._waiting[table, times]
        waiting.append(written)
        if len(waiting) >= MERGED or _bytes(waiting) >= LARGEST:
            del self._waiting[table, times]
            if (made := self._merge(table, waiting)) is not None:
                self.add_written_part(table, made, times + 1)

    def _merge(self, table: str, parts: list[WrittenPartInfo]) -> WrittenPartInfo | None:
        """Merge the readable parts. An unreadable part stays as it is, because readers ignore it."""
        while len(parts) > 1:
            try:
                return _replace(self._storage, table, parts)
            except _UnreadableError as error:
                parts = [each for each in parts if each.part != error.part]
            except Exception:  # the small parts stay until the merged part exists; every driver has its own errors
                return None
            finally:
                pa.default_memory_pool().release_unused()  # a merge takes as much memory as the largest part
        return None

    def merge_earlier_attempts(self, attempt: int) -> None:
        """Merge small parts of earlier attempts, and remove parts that merged parts replace."""
        there = self._storage.list_names()
        for table in (table for table in _MERGED_TABLES if table in there):
            for earlier in {part.attempt for part in list_parts_in_folder(self._storage, table) if part.attempt < attempt}:
                with contextlib.suppress(Exception):  # every driver has its own errors
                    _merge_attempt(self._storage, table, earlier)


# --- records of finished runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeOfTableParts:
    """The size of a table's parts."""

    files: int
    bytes: int
    rows: int


@dataclass
class CompactionResult:
    """The result of compacting a record."""

    run: FolderStorage
    #: size of each table that has parts
    before: dict[str, SizeOfTableParts] = field(default_factory=dict)
    after: dict[str, SizeOfTableParts] = field(default_factory=dict)
    #: paths of parts that were left unchanged, because they are unreadable or a later release wrote them
    left: list[str] = field(default_factory=list)


def compact_record(
    address: str | os.PathLike[str],
    histograms_every: int = 1,
    killed: bool = False,
    over: Callable[[], None] = lambda: None,
) -> CompactionResult:
    """Merge the parts of a record into few parts, in place. Keep every row, except histograms that you ask to drop.

    Args:
        address: the record, or a folder above it. A path or any fsspec address.
        histograms_every: keep the histograms of one sample in every so many steps. We also keep the histograms of the last
            sample, of triggered samples, and of samples with NaN or infinity.
        killed: True if the run was killed. We then compact the record although it does not say that the run has ended.
        over: function that is called after each table.

    Raises:
        RecordError: there is no record, its run has not ended, or the record cannot be written.
        ConfigError: `histograms_every` is below 1.

    Example:
        >>> done = compact_record("runs/a", histograms_every=50, killed=True)
        >>> done.before["histograms"].files, done.after["histograms"].files, done.left
        (3, 1, [])
    """
    if histograms_every < 1:
        raise ConfigError(f"histograms_every is {histograms_every}; it must be a whole number, at least 1")
    run = find_record(address)
    fingerprint = read_fingerprint(run)
    if not killed and "imported" not in fingerprint and not has_ended(run):
        raise RecordError(f"the run at {run} goes on, according to its {STATUS}. If it was killed, pass --killed")
    named = _named_steps(run) if histograms_every > 1 else set[int]()

    def keep(steps: set[int]) -> set[int]:
        first_of_each = {step // histograms_every: step for step in sorted(steps, reverse=True)}
        return {*first_of_each.values(), *(named & steps), max(steps)}

    done = CompactionResult(run, before=_sizes(run))
    for table in SCHEMAS:
        if table in done.before:
            is_thinned = table in HISTOGRAMS and histograms_every > 1
            for attempt in {part.attempt for part in list_parts_in_folder(run, table)}:
                done.left += _merge_attempt(run, table, attempt, keep if is_thinned else None)
        over()
    done.after = _sizes(run)
    return done


def copy_record(address: str | os.PathLike[str], output: str | os.PathLike[str]) -> FolderStorage:
    """Copy every file of a record, and return the copy. The copy is a valid record only after the last file was copied.

    Args:
        address: the record, or a folder above it. A path or any fsspec address.
        output: an empty or new folder, or any fsspec address.

    Raises:
        ConfigError: the new folder is not empty, or cannot be written.
        RecordError: there is no record, or one of its files cannot be read.
    """
    run, copied = find_record(address), FolderStorage(output)
    if copied.list_names():
        raise ConfigError(f"{copied} is not empty; name a new folder")
    for name in sorted(run.list_all_files(), key=lambda name: parse_attempt_number(name) is not None):
        try:
            content = run.read_file(name)
        except Exception as error:  # every driver has its own errors
            raise RecordError(f"{run.path(name)} cannot be read: {error}") from None
        try:
            copied.replace_file(name, content)
        except Exception as error:
            raise ConfigError(
                f"{copied.path(name)} cannot be written: {getattr(error, 'strerror', None) or error}"
            ) from None
    return copied


def has_ended(run: FolderStorage) -> bool:
    """Return whether the run has ended according to the record's status file."""
    try:
        return "ended" in read_status(run)
    except RecordError:
        return False


def _sizes(run: FolderStorage) -> dict[str, SizeOfTableParts]:
    return {
        table: SizeOfTableParts(len(names), run.measure_size(table), count_table_rows(run, table))
        for table in SCHEMAS
        if (names := run.list_names(table))
    }


def _named_steps(run: FolderStorage) -> set[int]:
    """Return the steps that a verdict may mention: steps of triggered samples, and of samples with NaN or infinity."""
    triggered = read_step_scalars(run, ["step", "trigger"]).filter(pl.col("trigger").is_not_null())
    counted = read_table_rows(run, "metrics", ["step", "nan", "inf"])
    nonfinite = counted.filter((pl.col("nan") > 0) | (pl.col("inf") > 0))
    return {*triggered["step"], *nonfinite["step"]}


# --- the parts of one attempt ---------------------------------------------------------------------------------------------


def _merge_attempt(
    run: FolderStorage, table: str, attempt: int, keep: Callable[[set[int]], set[int]] | None = None
) -> list[str]:
    """Merge the parts of a table and an attempt. Remove parts that the merged parts replace.

    Args:
        keep: function that takes all steps and returns the steps to keep. None keeps all.

    Returns:
        Paths of unreadable parts, which are left unchanged.

    Raises:
        RecordError: a part cannot be written.
    """
    unreadable = list[str]()
    while True:
        parts = [
            part for part in list_parts_in_folder(run, table) if part.attempt == attempt and part.path not in unreadable
        ]
        try:
            _merge_readable(run, table, parts, keep)
            return unreadable
        except _UnreadableError as error:  # do not count its steps, because other parts may have them too
            unreadable.append(error.part.path)


def _merge_readable(
    run: FolderStorage, table: str, parts: Sequence[Part], keep: Callable[[set[int]], set[int]] | None
) -> None:
    owners, found = EffectiveParts(table), list[tuple[Part, set[int], set[int]]]()
    for part in order_merged_parts_first(parts):
        with _reading(part):
            steps = read_part_steps(run, table, part)
        found.append((part, steps, owners.add_part(part, steps)))
    kept = keep(set(owners.of_step)) if keep and owners.of_step else set(owners.of_step)
    taken, spare = list[WrittenPartInfo](), list[Part]()
    for part, steps, new in found:
        if new & kept:
            taken.append(
                WrittenPartInfo(part, read_part_size(run, part), None if steps <= new & kept else frozenset(new & kept))
            )
        else:
            spare.append(part)
    if any(new != steps for _, steps, new in found):  # first make sure that kept parts are readable
        for each in taken:
            for _ in _rows(run, table, each):
                pass
    # An earlier merge that was killed may have written the same part already. Then this part is in `spare` and must stay.
    made = {_replace(run, table, batch).part for batch in _batches(taken) if len(batch) > 1 or batch[0].steps is not None}
    _remove(run, [part for part in spare if part not in made])


def _batches(parts: Sequence[WrittenPartInfo]) -> Iterator[list[WrittenPartInfo]]:
    """Yield batches of parts to merge, in order of steps. A large part is the only part in its batch."""
    waiting: list[WrittenPartInfo] = []
    for each in sorted(parts, key=lambda each: (each.part.first, each.part.last)):
        if each.size >= LARGEST // 2:
            yield [each]
            continue
        waiting.append(each)
        if _bytes(waiting) >= LARGEST:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _bytes(parts: Sequence[WrittenPartInfo]) -> int:
    return sum(each.size for each in parts)


def _replace(run: FolderStorage, table: str, parts: Sequence[WrittenPartInfo]) -> WrittenPartInfo:
    """Replace several parts of one attempt with one part.

    Raises:
        _UnreadableError: a part cannot be read to its end; nothing was changed.
        RecordError: the new part cannot be written; nothing was changed.
    """
    rows: Iterator[pa.Table] = (rows for each in parts for rows in _rows(run, table, each))
    if table in SHARED:  # two processes may have added the same rows
        rows = iter([_distinct(pa.concat_tables(rows))])
    groups = _split_by_step(rows) if table in _BY_STEP else _join_groups(rows)
    content, checksum = parquet.encode_parquet_tables(make_arrow_schema(table), groups)
    first, last = min(each.part.first for each in parts), max(each.part.last for each in parts)
    made = Part.make_part_name(table, parts[0].part.attempt, first, last, checksum)
    try:
        run.replace_file(made.path, content)
    except Exception as error:  # every driver has its own errors
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"{run.path(made.path)} cannot be written: {reason}; nothing was lost") from None
    _remove(run, [each.part for each in parts if each.part.path != made.path])
    return WrittenPartInfo(made, len(content))


def _rows(run: FolderStorage, table: str, written: WrittenPartInfo) -> Iterator[pa.Table]:
    """Yield the rows that count in a part, one row group at a time."""
    with _reading(written.part):
        for rows in read_row_groups(run, table, written.part, whole=True):
            yield rows if written.steps is None else rows.filter(pc.is_in(rows["step"], pa.array(written.steps, pa.int64())))


@contextlib.contextmanager
def _reading(part: Part) -> Iterator[None]:
    try:
        yield
    except (PartGoneError, PartDamagedError):
        raise _UnreadableError(part) from None


def _remove(run: FolderStorage, parts: Iterable[Part]) -> None:
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            run.delete_file(part.path)


def _distinct(rows: pa.Table) -> pa.Table:
    return pl.DataFrame(pl.from_arrow(rows)).unique(maintain_order=True).to_arrow().cast(rows.schema)


def _join_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Concatenate small tables, so that each result has enough rows."""
    waiting, rows = list[pa.Table](), 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if rows >= _GROUP:
            yield pa.concat_tables(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _split_by_step(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield a table for each step of the tables, in their order."""
    for rows in tables:
        steps = rows["step"].to_numpy()
        changes = (steps[1:] != steps[:-1]).nonzero()[0] + 1 if len(steps) else []
        ends = [0, *map(int, changes), len(rows)]
        for first, last in itertools.pairwise(ends):
            yield rows.slice(first, last - first)
