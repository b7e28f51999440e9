"""Puts few large parts in the place of many small ones, so that reading all steps does not open thousands of files.

`MERGED` parts become one, `MERGED` of those another one, and so on, until a part has `LARGEST` bytes. The new one is held
in memory while it is made, and a row group of one of the others at a time; of a remote one all. So a record of any length
has a few hundred parts, beside one for each `LARGEST` bytes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from . import parquet
from .parts import (
    SHARED,
    Owners,
    PartDamagedError,
    PartGoneError,
    parts_in,
    read_groups,
    read_steps,
    size_of,
    widest_first,
)
from .schema import TABLES, Part, arrow_schema, part_name
from .storage import Storage

#: parts that are merged into one
MERGED = 64
#: bytes from which on parts are no longer merged
LARGEST = 64 << 20
#: rows of a row group, at the least, if there are as many
_GROUP = 1 << 17
#: tables that are read a step at a time: their parts keep the rows of each step together
BY_STEP = tuple(table.name for table in TABLES.values() if table.by_step)
#: tables with one writer an attempt, which merging relies on
_MERGED_TABLES = tuple(table for table in TABLES if table not in SHARED)


@dataclass(frozen=True)
class Written:
    """A part and its bytes."""

    part: Part
    size: int


class Merger:
    """Merges the parts of one attempt as they are written, and once what earlier attempts left."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        #: by table and how often they have been merged
        self._waiting: dict[tuple[str, int], list[Written]] = defaultdict(list)

    def wrote(self, table: str, written: Written, times: int = 0) -> None:
        """A part is there; merges what is due.

        Args:
            times: how often it has been merged.
        """
        if table not in _MERGED_TABLES or written.size >= LARGEST // 2:
            return
        waiting = self._waiting[table, times]
        waiting.append(written)
        if len(waiting) >= MERGED or _bytes(waiting) >= LARGEST:
            del self._waiting[table, times]
            if (made := self._merge(table, [each.part for each in waiting])) is not None:
                self.wrote(table, made, times + 1)

    def tidy_up(self, attempt: int) -> None:
        """Merge what attempts before one left in small parts, and remove what merged parts hold."""
        there = self._storage.names()
        for table in (table for table in _MERGED_TABLES if table in there):
            earlier = defaultdict(list)
            for part in parts_in(self._storage, table):
                if part.attempt < attempt:
                    earlier[part.attempt].append(part)
            for parts in earlier.values():
                for batch in _batches(self._not_yet_merged(table, parts)):
                    self._merge(table, [each.part for each in batch])

    def _merge(self, table: str, parts: Sequence[Part]) -> Written | None:
        """Put one part in the place of several of one attempt; what cannot be read stays as it is."""
        read: list[Part] = []
        rows = self._rows(table, parts, read)
        groups = by_step(rows) if table in BY_STEP else in_groups(rows)
        try:
            content, checksum = parquet.encode_all(arrow_schema(table), groups)
        except Exception:  # one of them is damaged in its middle; every driver has errors of its own
            return None
        finally:
            pa.default_memory_pool().release_unused()  # a merge takes as much as the largest part, once in a long while
        if len(read) < 2:
            return None
        first, last = min(part.first for part in read), max(part.last for part in read)
        merged = Part.named(table, part_name(parts[0].attempt, first, last, checksum))
        assert merged
        with contextlib.suppress(Exception):  # until the merged part is there, the small ones are
            self._storage.write(merged.path, content)
            for part in read:
                self._storage.remove(part.path)
            return Written(merged, len(content))
        return None

    def _rows(self, table: str, parts: Sequence[Part], read: list[Part]) -> Iterator[pa.Table]:
        """What each part has, one after the other and a row group at a time; those that can be read are added to `read`.

        A part that readers leave out stays alone: it must not cost the others.

        Raises:
            PartDamagedError: one is damaged behind its first row group.
        """
        for part in parts:
            groups = read_groups(self._storage, table, part, whole=True)
            try:
                first = next(groups)
            except (PartGoneError, PartDamagedError, StopIteration):
                continue
            read.append(part)
            yield first
            yield from groups

    def _not_yet_merged(self, table: str, parts: Sequence[Part]) -> list[Written]:
        """The small ones of an attempt's parts; those that a process was killed before it could remove are removed."""
        owners, small = Owners(table), list[Part]()
        for part in widest_first(parts):
            if owners.has(part):
                self._remove(part)
            elif not part.merged:
                small.append(part)
            elif (steps := self._steps(table, part)) and not owners.add(part, steps):
                self._remove(part)
        return [Written(part, size_of(self._storage, part)) for part in small]

    def _steps(self, table: str, part: Part) -> set[int]:
        """That a part has; none if it cannot be read."""
        with contextlib.suppress(PartGoneError, PartDamagedError):
            return read_steps(self._storage, table, part)
        return set()

    def _remove(self, part: Part) -> None:
        with contextlib.suppress(Exception):
            self._storage.remove(part.path)


def _bytes(parts: Sequence[Written]) -> int:
    return sum(each.size for each in parts)


def _batches(parts: Sequence[Written]) -> Iterator[list[Written]]:
    """Of parts that are small, as many as are merged at a time."""
    batch: list[Written] = []
    for each in parts:
        if each.size < LARGEST // 2:
            batch.append(each)
        if _bytes(batch) >= LARGEST:
            yield batch
            batch = []
    yield batch


def in_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables put together to some with enough rows."""
    waiting, rows = list[pa.Table](), 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if rows >= _GROUP:
            yield pa.concat_tables(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def by_step(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Rows of each step, in the order of the tables."""
    for rows in tables:
        steps = rows["step"].to_numpy()
        changes = (steps[1:] != steps[:-1]).nonzero()[0] + 1 if len(steps) else []
        ends = [0, *map(int, changes), len(rows)]
        for first, last in itertools.pairwise(ends):
            yield rows.slice(first, last - first)
