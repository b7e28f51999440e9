"""Fewer and larger parts for a record whose run is over, and fewer histograms if somebody asks for that.

A new part is written before those that it replaces are removed, and readers take each step once: whoever is killed in
between has lost nothing, and may start again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import RecordError
from . import merging, parquet
from .parts import (
    SHARED,
    Owners,
    PartDamagedError,
    PartGoneError,
    count_rows,
    parts_in,
    read_groups,
    size_of,
    steps_in,
    widest_first,
)
from .reader import find_run, read_fingerprint
from .schema import SCHEMAS, STATUS, Part, arrow_schema, part_name
from .storage import Storage
from .thinning import FewerExperts, Thinning, named_steps

_NOTHING = Thinning()


@dataclass(frozen=True)
class Size:
    """What the parts of a table take."""

    files: int
    bytes: int
    rows: int


@dataclass
class Compacted:
    """What became of a record."""

    run: Storage
    #: by table, those without parts left out
    before: dict[str, Size] = field(default_factory=dict)
    after: dict[str, Size] = field(default_factory=dict)
    #: paths of parts that stay as they were, since they cannot be read or have what this release does not know
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Whole:
    """A part that can be read to its end."""

    part: Part
    size: int
    #: of which its rows are taken
    steps: frozenset[int]
    #: whether some of its rows are not
    changes: bool = False


def compact(
    address: str | os.PathLike[str],
    thinning: Thinning = _NOTHING,
    killed: bool = False,
    over: Callable[[], None] = lambda: None,
) -> Compacted:
    """Merge the parts of a record into few, in place; every row stays, but for histograms that `thinning` drops.

    Args:
        address: the record, or a folder above it; a path or any fsspec address.
        killed: the run is over, though its record does not say so.
        over: called when a table is done.

    Raises:
        RecordError: there is no record, its run goes on, or it cannot be written.

    Example:
        >>> done = compact("runs/a", Thinning(every=50), killed=True)
        >>> done.before["histograms"].files, done.after["histograms"].files, done.left
        (3, 1, [])
    """
    run = find_run(address)
    fingerprint = read_fingerprint(run)
    if not killed and "imported" not in fingerprint and not has_ended(run):
        raise RecordError(f"the run at {run} goes on, as far as its {STATUS} tells; if it was killed, say so: --killed")
    if thinning.by_age:
        thinning = replace(thinning, keep={*thinning.keep, *named_steps(run)})
    done = Compacted(run, before=_sizes(run))
    for table in SCHEMAS:
        if table in done.before:
            _Table(run, table, thinning, done).compact()
        over()
    done.after = _sizes(run)
    return done


def has_ended(run: Storage) -> bool:
    """Whether the status file of a record says that its run is over."""
    with contextlib.suppress(Exception):
        content = json.loads(run.read(STATUS))
        return isinstance(content, dict) and "ended" in content
    return False


def _sizes(run: Storage) -> dict[str, Size]:
    return {
        table: Size(len(names), run.size(table), count_rows(run, table)) for table in SCHEMAS if (names := run.names(table))
    }


class _Table:
    """A table whose parts are merged."""

    def __init__(self, run: Storage, table: str, thinning: Thinning, done: Compacted) -> None:
        self._run, self._table, self._thinning, self._done = run, table, thinning, done
        self._schema = arrow_schema(table)

    def compact(self) -> None:
        """Merge the parts of each attempt."""
        by_attempt = defaultdict(list)
        for part in parts_in(self._run, self._table):
            by_attempt[part.attempt].append(part)
        for attempt, parts in by_attempt.items():
            self._compact_attempt(attempt, parts)

    def _compact_attempt(self, attempt: int, parts: Sequence[Part]) -> None:
        whole = [found for part in widest_first(parts) if (found := self._looked_at(part))]
        chosen = self._chosen(whole)
        of_step = None
        if self._thinning.experts and self._thinning.touches(self._table):
            of_step = FewerExperts(self._run, self._table, attempt).of_step
        for batch in _batches([each for each in chosen if each.steps]):
            if len(batch) > 1 or batch[0].changes or of_step:
                self._replace(attempt, batch, of_step)
        # Only now: what else holds their rows has been read to its end.
        self._remove(each.part for each in chosen if not each.steps)

    def _looked_at(self, part: Part) -> _Whole | None:
        """The part, if all of it can be read and nothing of it would be lost."""
        steps: set[int] = set()
        try:
            for rows in read_groups(self._run, self._table, part):
                steps |= steps_in(rows)
            return _Whole(part, size_of(self._run, part), frozenset(steps))
        except (PartGoneError, PartDamagedError):
            self._done.left.append(part.path)
            return None

    def _chosen(self, whole: Sequence[_Whole]) -> list[_Whole]:
        """Each part with the steps that are to be taken from it; a step that several parts hold is taken once."""
        owners, chosen = Owners(self._table), []
        by_age = self._thinning.touches(self._table)
        kept = self._thinning.kept({step for each in whole for step in each.steps}) if by_age else None
        for each in whole:
            steps = frozenset(owners.add(each.part, each.steps))
            steps = steps if kept is None else steps & kept
            chosen.append(replace(each, steps=steps, changes=steps != each.steps))
        return chosen

    def _replace(self, attempt: int, batch: Sequence[_Whole], of_step: Callable[[pa.Table], pa.Table] | None) -> None:
        """Put one part in the place of some."""
        content, checksum = parquet.encode_all(self._schema, self._groups(batch, of_step))
        steps = {step for each in batch for step in each.steps}
        path = f"{self._table}/{part_name(attempt, min(steps), max(steps), checksum)}"
        try:
            self._run.write(path, content)
        except Exception as error:  # every driver has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise RecordError(f"{self._run.path(path)} cannot be written: {reason}; nothing was lost") from None
        self._remove(each.part for each in batch if each.part.path != path)

    def _groups(self, batch: Sequence[_Whole], of_step: Callable[[pa.Table], pa.Table] | None) -> Iterator[pa.Table]:
        rows: Iterator[pa.Table] = (rows for each in batch for rows in self._rows(each))
        if self._table in SHARED:  # somebody may have added the same rows twice
            rows = iter([_distinct(pa.concat_tables(rows))])
        if self._table not in merging.BY_STEP:
            return merging.in_groups(rows)
        by_step = merging.by_step(rows)
        return map(of_step, by_step) if of_step else by_step

    def _rows(self, each: _Whole) -> Iterator[pa.Table]:
        for rows in read_groups(self._run, self._table, each.part):
            yield rows.filter(pc.is_in(rows["step"], pa.array(each.steps, pa.int64()))) if each.changes else rows

    def _remove(self, parts: Iterable[Part]) -> None:
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                self._run.remove(part.path)


def _distinct(rows: pa.Table) -> pa.Table:
    return pl.DataFrame(pl.from_arrow(rows)).unique(maintain_order=True).to_arrow().cast(rows.schema)


def _batches(parts: Sequence[_Whole]) -> Iterator[list[_Whole]]:
    """Parts in the order of steps, as many as are merged into one; what is large is alone."""
    waiting: list[_Whole] = []
    for each in sorted(parts, key=lambda each: (each.part.first, each.part.last)):
        if each.size >= merging.LARGEST // 2:
            yield [each]
            continue
        waiting.append(each)
        if sum(other.size for other in waiting) >= merging.LARGEST:
            yield waiting
            waiting = []
    if waiting:
        yield waiting
