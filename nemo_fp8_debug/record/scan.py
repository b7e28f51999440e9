"""Read a table column by column and a few steps at a time, so that a record of any length can be read.

An index maps each step to the part with its rows, and the outline in the part's footer maps the rows to operands. Earlier
releases wrote parts without outlines. For these parts we read the names of layers and roles instead.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from ..core.memory import release_freed_memory, retain_freed_memory
from ..core.threads import map_in_threads
from ..errors import RecordError
from .outline import PartOutline, RowsOfStep, list_rows_by_step
from .parts import (
    KEYS,
    EffectiveParts,
    Ints,
    PartDamagedError,
    PartGoneError,
    format_error_in_one_line,
    order_newest_parts_first,
    read_effective_parts,
    read_part_columns,
    read_part_outline,
    read_row_keys,
    reject_impossible_values,
    warn_of_damaged_parts,
)
from .reader import Address
from .schema import SCHEMAS, Part, make_arrow_schema
from .storage import FolderStorage


@dataclass(frozen=True)
class TableStepIndex:
    """The sampled steps of a table, and the part that has each step."""

    #: steps, int64, ascending
    steps: Ints
    owner: dict[int, Part]
    #: reason for ignoring each ignored part, by path
    damaged: dict[str, str]

    @classmethod
    def read_from_outlines(
        cls,
        run: FolderStorage,
        table: str,
        outline_of: Callable[[Part], PartOutline],
        parts: Sequence[Part] | None = None,
        use: Callable[[Part, PartOutline], None] = lambda part, outline: None,
    ) -> TableStepIndex:
        """Read the outlines of parts (descriptions of their rows), several at once.

        Args:
            outline_of: function that reads the outline of a part. It raises the errors of `read_part_outline`.
            parts: parts to read first, or None for all parts of the table.
            use: function that is called with each part and its outline, before the part's steps count. It may raise the same
                errors.
        """
        owners = EffectiveParts(table)

        def add(part: Part, outline: PartOutline) -> None:
            use(part, outline)
            owners.add_part(part, outline.steps)

        damaged = read_effective_parts(run, table, outline_of, add, owners, parts, map_in_threads)
        return cls(np.array(sorted(owners.of_step), np.int64), owners.of_step, damaged)

    @property
    def in_order(self) -> list[tuple[Part, list[int]]]:
        """Return parts and their steps, in order of steps. A part appears twice if another part has steps between its
        steps.
        """
        runs = itertools.groupby(self.steps.tolist(), self.owner.__getitem__)
        return [(part, list(steps)) for part, steps in runs]

    @cached_property
    def steps_by_part(self) -> dict[Part, list[int]]:
        """Return the steps of each part, ascending."""
        parts: dict[Part, list[int]] = {}
        for part, steps in self.in_order:
            parts.setdefault(part, []).extend(steps)
        return parts

    @cached_property
    def newest_parts_first(self) -> list[Part]:
        """Return the parts that have steps. Parts of the latest attempt come first, even if an earlier attempt has later
        steps.
        """
        return order_newest_parts_first(self.steps_by_part)

    @property
    def newest_part(self) -> Part | None:
        """Return the last part of the latest attempt."""
        return self.newest_parts_first[0] if self.newest_parts_first else None

    def find_nearest_step(self, step: int) -> int:
        """Return the sampled step closest to `step`. If two steps are equally close, return the earlier step."""
        after = min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)
        before = max(after - 1, 0)
        return int(min(self.steps[before], self.steps[after], key=lambda s: abs(int(s) - step)))


@dataclass(frozen=True)
class StepRows:
    """Consecutive rows of a part that belong to one step."""

    #: index of the step among all steps
    step: int
    #: index of the first row in the part
    first: int
    #: index of the layout, which lists the operand of each row
    layout: int


class OperandIndex:
    """The operands of rows. Most steps have the same list of operands, so we read the names once for each list."""

    def __init__(self, run: FolderStorage, table: str) -> None:
        self._run, self._table = run, table
        #: layer and role of each operand
        self.names = pl.DataFrame(schema=dict.fromkeys(KEYS[1:], pl.String))
        #: for each layout: the index of each row's operand, int64 [rows]
        self.layouts: list[Ints] = []
        self._layout: dict[str, int] = {}

    def add_operands_of_part(self, part: Part, outline: PartOutline) -> None:
        """Add the operands of a part.

        Raises:
            PartDamagedError: the part's names cannot be read, or do not match its footer.
        """
        names = read_operands_by_digest(self._run, self._table, part, outline, self._layout)
        for digest, of_stretch in names.items():
            self._layout[digest] = len(self.layouts)
            self.layouts.append(self._places(pl.DataFrame(pl.from_arrow(of_stretch))))

    def locate_step_rows(self, outline: PartOutline, places: Mapping[int, int]) -> list[StepRows]:
        """Return the ranges of a part's rows that belong to the wanted steps, in order of steps.

        Args:
            places: index of each wanted step, by step.
        """
        runs = [
            StepRows(places[stretch.step], first, self._layout[stretch.digest])
            for first, stretch in place_stretches(outline)
            if stretch.step in places
        ]
        return sorted(runs, key=lambda run: run.step)

    def _places(self, names: pl.DataFrame) -> Ints:
        """Return the index of each row's operand. Add new operands to the list."""
        new = names.unique(maintain_order=True).join(self.names, on=KEYS[1:], how="anti", maintain_order="left")
        self.names = pl.concat([self.names, new])
        places = names.join(self.names.with_row_index("place"), on=KEYS[1:], how="left", maintain_order="left")["place"]
        found: Ints = places.cast(pl.Int64).to_numpy()
        return found


def place_stretches(outline: PartOutline) -> list[tuple[int, RowsOfStep]]:
    """Return the stretches of a part, each with the index of its first row."""
    firsts = itertools.accumulate((stretch.rows for stretch in outline.stretches), initial=0)
    return list(zip(firsts, outline.stretches, strict=False))


def read_operands_by_digest(
    run: FolderStorage, table: str, part: Part, outline: PartOutline, known: Container[str] = ()
) -> dict[str, pa.Table]:
    """Return the layers and roles of a part's stretches by digest. Read them once for each digest.

    Args:
        known: digests to skip.

    Raises:
        PartGoneError: as for `read_row_keys`.
        PartDamagedError: as for `read_row_keys`, and if the names do not match the footer.
    """
    new = dict[str, tuple[int, RowsOfStep]]()
    for first, stretch in place_stretches(outline):
        if stretch.digest not in known:
            new.setdefault(stretch.digest, (first, stretch))
    tables = (
        read_row_keys(run, table, part, [(first, first + stretch.rows) for first, stretch in new.values()]) if new else []
    )
    if [list_rows_by_step(names) for names in tables] != [[stretch] for _, stretch in new.values()]:
        raise PartDamagedError("its footer does not match its rows")
    return {digest: names.select(KEYS[1:]) for digest, names in zip(new, tables, strict=True)}


#: number of tables from other processes that this process keeps open
_OPEN = 8
#: after reading more parts than this, we return unused memory to the system
_FEW = 8
#: if we read more than this many times as many rows as wanted, we copy the wanted rows, so that the other rows are freed
_MANY_TIMES = 4


class RowChunk(NamedTuple):
    """Rows of a few steps, grouped by step."""

    #: the requested columns; text columns are strings or categories
    rows: pl.DataFrame
    #: for each step: its index, and the indices of its rows' operands, int64 [rows of the step]; steps may share an array
    steps: Sequence[tuple[int, Ints]]

    @property
    def operand_of_each_row(self) -> Ints:
        """Return the index of each row's operand, int64 [rows]."""
        return np.concatenate([np.zeros(0, np.int64), *(operands for _, operands in self.steps)])

    @property
    def step_of_each_row(self) -> Ints:
        """Return the index of each row's step, int64 [rows]."""
        return np.repeat([step for step, _ in self.steps], [len(each) for _, each in self.steps]).astype(np.int64)

    def split_by_step(self) -> Iterator[tuple[int, slice, Ints]]:
        """Yield each step's index, the slice of its rows, and the indices of their operands."""
        first = 0
        for step, operands in self.steps:
            yield step, slice(first, first + len(operands)), operands
            first += len(operands)


def return_chunk_unchanged(chunk: RowChunk) -> Any:
    """Return the chunk unchanged."""
    return chunk


class TableScan:
    """The rows of a table. If a step was trained twice, the later attempt's rows count."""

    def __init__(self, run: Address, table: str = "metrics") -> None:
        """
        Args:
            run: folder of a record.
            table: a table whose rows belong to operands.
        """
        retain_freed_memory()
        pa.set_memory_pool(pa.system_memory_pool())  # the system's pool returns memory within milliseconds, Arrow's does not
        self._storage, self._table = FolderStorage(run), table
        self._outlines = dict[Part, PartOutline]()

        def outline_of(part: Part) -> PartOutline:
            self._outlines[part] = outline = read_part_outline(self._storage, table, part)
            return outline

        operands = OperandIndex(self._storage, table)
        index = TableStepIndex.read_from_outlines(self._storage, table, outline_of, use=operands.add_operands_of_part)
        warn_of_damaged_parts(self._storage, table, index.damaged)
        #: sampled steps, int64, ascending
        self.steps: Ints = index.steps
        places = {step: place for place, step in enumerate(index.steps.tolist())}
        self._parts = [
            (part, operands.locate_step_rows(self._outlines[part], {step: places[step] for step in steps}))
            for part, steps in index.in_order
        ]
        used = list(dict.fromkeys(run.layout for _, runs in self._parts for run in runs))
        layouts = operands.layouts
        met, first = np.unique(np.concatenate([np.zeros(0, np.int64), *(layouts[i] for i in used)]), return_index=True)
        order = met[np.argsort(first)]
        #: layer and role of each operand, in the order of their first rows
        self.operands = operands.names[order]
        place = np.empty(len(operands.names), dtype=np.int64)
        place[order] = np.arange(len(order))
        self._layouts = {i: place[layouts[i]] for i in used}
        self._texts = _texts_of([(self._outlines[part], steps) for part, steps in index.steps_by_part.items()])
        self.schema: Mapping[str, Any] = SCHEMAS[table]

    def __reduce__(self) -> tuple[Callable[..., TableScan], tuple[str, str, str]]:
        """Pickle the address only. Another process reads the index itself, once."""
        return _opened, (str(self._storage), self._table, self._digest)

    @cached_property
    def _digest(self) -> str:
        """Return a digest of steps and operands, in order."""
        digest = hashlib.blake2b(self.steps.tobytes(), digest_size=16)
        digest.update(self.operands.select(pl.concat_str("layer", "role", separator=" ").str.join("\n")).item().encode())
        return digest.hexdigest()

    def list_distinct_values(self, column: str) -> list[str | None] | None:
        """Return the different values of a text column, in the order of their first rows. Return None if the footers do not
        list them.
        """
        return self._texts.get(column)

    def read_chunks(
        self,
        columns: Sequence[str],
        operands: Ints | None = None,
        steps: Ints | None = None,
        then: Callable[[RowChunk], Any] = return_chunk_unchanged,
    ) -> Iterator[Any]:
        """Yield rows in order of steps. Read several parts at once, and keep only a few in memory.

        Args:
            columns: names of the columns to read.
            operands, steps: the new index of each operand or step in chunks, or -1 to leave it out. None keeps the indices.
            then: function to apply to each chunk. Several threads call it.
        """
        wanted, chosen = self._wanted(operands, steps)
        unreadable: dict[str, str] = {}

        def made(of_part: tuple[Part, list[StepRows]]) -> Any:
            chunk = self._chunk(sorted(set(columns)), chosen, unreadable, of_part)
            return None if chunk is None else then(chunk)

        try:
            for found in map_in_threads(made, wanted):
                if found is not None:
                    yield found
        finally:
            if len(wanted) > _FEW:
                release_freed_memory()
        warn_of_damaged_parts(self._storage, self._table, unreadable)

    def group_equal_steps(
        self, column: str | None, operands: Ints | None = None, steps: Ints | None = None
    ) -> Iterator[tuple[RowChunk, Sequence[int]]]:
        """Yield rows of a column. If several steps have the same operands with the same values, yield only the first step.

        Args:
            column: a text column. If None, compare only the steps' operands.
            operands, steps: as for `read_chunks`.

        Returns:
            Chunks. With each chunk, for each of its steps, the number of steps that are equal to it, including the step
            itself. Steps count as equal only if the footers show that they are.
        """
        wanted, chosen = self._wanted(operands, steps)
        left = [(part, run) for part, runs in wanted for run in runs if chosen[run.layout].operands.size]
        unreadable: dict[str, str] = {}
        while left:
            kinds = [self._kind(column, *each) for each in left]
            times, first = Counter(kinds), dict[Hashable, tuple[Part, StepRows]]()
            for kind, each in zip(kinds, left, strict=True):
                first.setdefault(kind, each)
            of_parts: dict[Part, list[StepRows]] = defaultdict(list)
            for part, run in first.values():
                of_parts[part].append(run)
            read = partial(self._chunk, [column] if column else [], chosen, unreadable)
            for (part, runs), chunk in zip(of_parts.items(), map_in_threads(read, list(of_parts.items())), strict=True):
                if chunk is not None:
                    yield chunk, [times[self._kind(column, part, run)] for run in runs]
            # If a part cannot be read, another part may still have the same values.
            lost = {kind for kind, (part, _) in first.items() if part.path in unreadable}
            left = [each for each, kind in zip(left, kinds, strict=True) if kind in lost and each[0].path not in unreadable]
        warn_of_damaged_parts(self._storage, self._table, unreadable)

    def _kind(self, column: str | None, part: Part, run: StepRows) -> Hashable:
        """Return a key that two stretches share if they have the same operands and the same values in a column."""
        outline = self._outlines[part]
        if column is None:
            return run.layout
        if column in outline.same:
            return run.layout, "same", outline.same[column]
        patterns = outline.patterns.get(column)
        return (run.layout, patterns[outline.locate_row(run.first)[0]]) if patterns else (part, run.first)

    def _wanted(
        self, operands: Ints | None, steps: Ints | None
    ) -> tuple[list[tuple[Part, list[StepRows]]], dict[int, _Chosen]]:
        """Return the parts that have wanted steps, and the wanted rows of each layout in these parts. See `read_chunks`."""
        wanted = [(part, kept) for part, runs in self._parts if (kept := _wanted(runs, steps))]
        layouts = {run.layout for _, runs in wanted for run in runs}
        return wanted, {layout: _Chosen.of(self._layouts[layout], operands) for layout in layouts}

    def _chunk(
        self,
        columns: Sequence[str],
        chosen: Mapping[int, _Chosen],
        unreadable: dict[str, str],
        of_part: tuple[Part, list[StepRows]],
    ) -> RowChunk | None:
        part, runs = of_part
        kept = [(run.step, run.first, some) for run in runs if (some := chosen[run.layout]).operands.size]
        if not kept:
            return None
        steps = [(step, some.operands) for step, _, some in kept]
        if not columns:
            return RowChunk(pl.DataFrame(), steps)
        try:
            rows = self._read(part, columns, [(first, some) for _, first, some in kept])
        except PartGoneError:
            raise RecordError(
                f"{self._storage.path(part.path)} is gone, because the run goes on and merged its parts. Try again"
            ) from None
        except Exception as error:
            unreadable[part.path] = format_error_in_one_line(error)
            return None
        return RowChunk(rows, steps)

    def _read(self, part: Part, columns: Sequence[str], kept: Sequence[tuple[int, _Chosen]]) -> pl.DataFrame:
        """
        Args:
            kept: the first row and the wanted rows of each stretch.
        """
        known = self._outlines[part].same
        same = {name: known[name] for name in columns if name in known}
        reject_impossible_values(
            pa.table({each.name: pa.array([same[each.name]], each.type) for each in make_arrow_schema(self._table, same)})
        )
        if varied := [name for name in columns if name not in same]:
            rows = self._varied(part, varied, kept)
        else:
            name, value = same.popitem()
            count = sum(len(some.operands) for _, some in kept)
            rows = pl.select(pl.repeat(value, count, dtype=self.schema[name]).alias(name))
        constant = [pl.lit(value, self.schema[name]).alias(name) for name, value in same.items()]
        return rows.with_columns(constant).select(columns)

    def _varied(self, part: Part, columns: Sequence[str], kept: Sequence[tuple[int, _Chosen]]) -> pl.DataFrame:
        """Read the columns that are not constant in the part. Arguments are the same as for `_read`."""
        spans = [(first + some.first, first + some.end) for first, some in kept]
        table, at = read_part_columns(self._storage, self._table, part, columns, spans)
        # The rows of a stretch stay consecutive in the result of the read.
        begins = at(np.array([first for first, _ in spans])).tolist()
        found = pa.concat_tables(some.of_rows(table, begin) for begin, (_, some) in zip(begins, kept, strict=True))
        rows = pl.DataFrame(pl.from_arrow(found))
        # A slice keeps all rows that were read in memory, so slices of each part would keep the whole record in memory.
        return rows[np.arange(len(rows))] if _MANY_TIMES * len(rows) < len(table) else rows


def _wanted(runs: Sequence[StepRows], steps: Ints | None) -> list[StepRows]:
    """Return the rows of wanted steps, with the steps' indices. See `TableScan.read_chunks`."""
    if steps is None:
        return list(runs)
    return [replace(run, step=int(steps[run.step])) for run in runs if steps[run.step] >= 0]


def _texts_of(parts: Sequence[tuple[PartOutline, Sequence[int]]]) -> dict[str, list[str | None]]:
    """Return the values of text columns, if footers list them for exactly the rows that count.

    Args:
        parts: outline of each part, and the steps that count in this part.
    """
    if any(len(outline.steps) != len(steps) for outline, steps in parts):
        return {}  # some rows were trained twice
    columns = set.intersection(*(set(outline.texts) for outline, _ in parts)) if parts else ()
    return {name: list(dict.fromkeys(value for outline, _ in parts for value in outline.texts[name])) for name in columns}


@lru_cache(_OPEN)
def _opened(address: str, table: str, digest: str) -> TableScan:
    """Open a table that another process has scanned.

    Raises:
        RecordError: the record has changed since the other process scanned it.
    """
    scan = TableScan(address, table)
    if scan._digest != digest:
        raise RecordError(f"{address} has changed while it was read, because the run goes on. Try again")
    return scan


@dataclass(frozen=True)
class _Chosen:
    """The wanted rows of a stretch."""

    #: indices of the rows' operands in chunks
    operands: Ints
    #: indices of the wanted rows in the stretch: the first, the one after the last, and all of them (None: all rows in
    #: between)
    first: int
    end: int
    places: Ints | None

    @classmethod
    def of(cls, layout: Ints, operands: Ints | None) -> _Chosen:
        """Choose the rows of wanted operands. See `TableScan.read_chunks`."""
        if operands is None:
            return cls(layout, 0, len(layout), None)
        of_rows = operands[layout]
        places = np.flatnonzero(of_rows >= 0)
        first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        return cls(of_rows[places], first, end, None if end - first == len(places) else places)

    def of_rows(self, table: pa.Table, begin: int) -> pa.Table:
        """Return the wanted rows of a table. The first wanted row is at index `begin`."""
        if self.places is None:
            return table.slice(begin, self.end - self.first)
        return table.take(self.places - self.first + begin)
