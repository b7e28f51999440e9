"""Parts of a record as matrices, steps x tensors, a metric at a time; what was read is held within bounds.

A part never changes and its name carries a checksum, so that what is held under its name is always valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import hearing
from ...record.reader import parts_of, read_part
from ...record.schema import SCHEMAS, Part, arrow_schema, attempt_of_fingerprint
from ...record.storage import Storage
from ..web.errors import NotReadable
from .cache import Cache
from .extent import Extent
from .part_index import WHAT_IF, Array, Layout, Texts, coded, laid_out, numbers_in

T = TypeVar("T")

#: bytes of metrics that are held, and of where the rows of parts are
_HELD, _LAYOUTS = 384 << 20, 64 << 20
#: and of where their values lie
_EXTENTS = 32 << 20
#: seconds for which the list of a record's parts is taken as it is
_LISTED = 1.0
#: records whose parts are known at a time, and parts whose steps are
_RECORDS, _PARTS = 256, 1 << 15
#: times that a record is read again where parts were merged meanwhile
_ATTEMPTS = 3
#: how many values are not finite: two columns as one
NONFINITE = "nonfinite"


class Gone(Exception):
    """A part was merged into another since it was listed."""


@dataclass(frozen=True)
class Index:
    """The sampled steps of a record, and which part has each."""

    version: str
    #: int64 [S], ascending
    steps: Array
    owner: dict[int, Part]
    #: by name why parts are left out
    damaged: dict[str, str]
    #: listed, by table
    listed: dict[str, list[Part]]
    #: what is out of the ordinary about the names of its files
    heard: list[str] = field(default_factory=list)

    @cached_property
    def newest_first(self) -> list[Part]:
        """The parts that have steps: those of the latest attempt before others, however far these came."""
        return sorted(self.held, key=lambda part: (part.attempt, part.last), reverse=True)

    @property
    def newest(self) -> Part | None:
        """The last part of the latest attempt."""
        return self.newest_first[0] if self.newest_first else None

    @cached_property
    def held(self) -> dict[Part, list[int]]:
        """The steps that each part has, ascending."""
        parts: dict[Part, list[int]] = {}
        for step in self.steps.tolist():
            parts.setdefault(self.owner[step], []).append(step)
        return parts

    def nearest(self, step: int) -> int:
        """The sampled step next to one; of two the earlier."""
        after = min(int(np.searchsorted(self.steps, step)), len(self.steps) - 1)
        before = max(after - 1, 0)
        return int(min(self.steps[before], self.steps[after], key=lambda s: abs(int(s) - step)))


@dataclass
class _Held:
    """An index, and when it was looked whether it still holds."""

    looked: float = 0.0
    index: Index | None = None


class Parts:
    """Reads the `metrics` of records, or another table of the same form."""

    def __init__(self, table: str = "metrics") -> None:
        """
        Args:
            table: whose rows are told apart by step, layer and role; those of what-if recipes are left out.
        """
        self.table = table
        self._indexes: Cache[_Held] = Cache(_RECORDS, lambda _: 1)
        self._steps: Cache[Array] = Cache(_PARTS, lambda _: 1)
        self._layouts: Cache[Layout] = Cache(_LAYOUTS, lambda held: 0 if held.rows is None else held.rows.nbytes)
        self._metrics: Cache[Array] = Cache(_HELD, lambda held: held.nbytes)
        self._extents: Cache[Extent] = Cache(_EXTENTS, lambda held: held.nbytes)
        self._harmed: dict[tuple[str, str, str], str] = {}
        self._texts: Cache[Texts] = Cache(_HELD // 8, lambda held: held.codes.nbytes)

    def index(self, run: Storage) -> Index:
        """The sampled steps of a record, as they are now.

        Raises:
            NotReadable: the folder cannot be listed.
        """
        held = self._indexes.get(str(run), _Held)
        known = held.index
        if known is not None and time.monotonic() - held.looked < _LISTED:
            return known
        known = held.index = self._looked(run, known)
        held.looked = time.monotonic()
        return known

    def _looked(self, run: Storage, known: Index | None) -> Index:
        for _ in range(_ATTEMPTS):
            try:
                with hearing() as heard:
                    listed, version = _listed(run)
            except Exception as error:  # every driver of a remote file system has errors of its own
                raise NotReadable(f"{run} cannot be listed ({type(error).__name__}: {error}); look at the folder.") from None
            # Damage may have been an outage: what could not be read is tried again.
            if known is not None and known.version == version and not known.damaged:
                return known
            with contextlib.suppress(Gone):
                return self._indexed(run, listed, version, heard)
        raise NotReadable(f"{run} changes faster than it can be read; try again.")

    def warm(self, run: Storage) -> None:
        """Learn the steps of a record before somebody asks."""
        with contextlib.suppress(NotReadable):
            self.index(run)

    def glance(self, run: Storage) -> Index:
        """What the names of parts say, where nothing more is known: the first and last step of each, damaged or not."""
        held = self._indexes.get(str(run), _Held).index
        if held is not None:
            return held
        with hearing():
            listed, _ = _listed(run)
        owner = {step: part for part in listed[self.table] for step in (part.first, part.last)}
        return Index("", np.array(sorted(owner), np.int64), owner, {}, listed)

    def _indexed(self, run: Storage, listed: dict[str, list[Part]], version: str, heard: list[str]) -> Index:
        """Steps by the rules of `read_table`: of attempts the latest, and a merged part before those it was made of.

        Raises:
            Gone: a part was merged into another since it was listed.
        """
        taken: dict[tuple[int, int], Part] = {}
        damaged: dict[str, str] = {}
        for part in listed[self.table]:
            if not part.merged and (part.attempt, part.first) in taken:
                continue
            try:
                steps = self._steps_of(run, part)
            except NotReadable as error:
                damaged[part.path] = str(error)
                continue
            for step in steps.tolist():
                taken.setdefault((part.attempt, step), part)
        owner = {step: part for (_, step), part in sorted(taken.items(), key=lambda item: item[0])}
        return Index(version, np.array(sorted(owner), np.int64), owner, damaged, listed, heard)

    def _steps_of(self, run: Storage, part: Part) -> Array:
        def make() -> Array:
            steps: Array = np.sort(numbers_in(pc.unique(_read(run, self.table, part, "step")["step"])))
            return steps

        return self._steps.get((str(run), part.path), make)

    def layout(self, run: Storage, part: Part) -> Layout:
        """Where a part's rows are."""

        def make() -> Layout:
            columns = "step", "layer", "role", *(() if self.table == "metrics" else ("scale_source",))
            return Layout(*laid_out(_read(run, self.table, part, *columns)))

        return self._layouts.get((str(run), part.path), make)

    def metric(self, run: Storage, part: Part, name: str) -> Array:
        """float64 [S, T], as the layout of the part has them; NaN where there is none."""

        def make() -> Array:
            values, _ = _values(run, self.table, part, name)
            return self.layout(run, part).spread(values, np.nan)

        return self._metrics.get((str(run), part.path, name), make)

    def columns(self, run: Storage, part: Part, *names: str) -> pa.Table:
        """Columns of a part, all its rows; they are not held."""
        return _read(run, self.table, part, *names)

    def extent(self, run: Storage, part: Part, name: str, steps: Sequence[int]) -> Extent:
        """Where the values of a metric lie at some steps of a part."""

        def make() -> Extent:
            whole = len(steps) == len(self._steps_of(run, part))
            values, step = _values(run, self.table, part, name, *(() if whole else ("step",)))
            if self.table != "metrics":
                values = np.where(_is_tried(run, self.table, part), np.nan, values)
            return Extent.of(values if step is None else values[np.isin(step, steps)])

        return self._extents.get((str(run), part.path, name, tuple(steps)), make)

    def unless_damaged(self, run: Storage, part: Part, what: str, read: Callable[[], T]) -> T | None:
        """What `read` finds in a part; None where that is damaged, which `harmed` tells from then on.

        Args:
            what: it reads; part of it may be damaged and part not.
        """
        key = str(run), part.path, what
        try:
            found = read()
        except NotReadable as error:
            self._harmed[key] = str(error)
            return None
        self._harmed.pop(key, None)
        return found

    def harmed(self, run: Storage) -> dict[str, str]:
        """By name, what is wrong with parts of which some columns were found damaged."""
        return {part: why for (of, part, _), why in list(self._harmed.items()) if of == str(run)}

    def texts(self, run: Storage, part: Part, name: str) -> Texts:
        """A column of text, as the layout of the part has it."""

        def make() -> Texts:
            codes, known = coded(_read(run, self.table, part, name)[name])
            return Texts(self.layout(run, part).spread((codes + 1).astype(np.uint16), 0), [None, *known])

        return self._texts.get((str(run), part.path, name), make)

    def settled(self, run: Storage, read: Callable[[Index], T]) -> T:
        """What `read` makes of a record; once more where parts were merged meanwhile.

        Raises:
            NotReadable: it cannot be read, or changes faster than it is read.
        """
        for _ in range(_ATTEMPTS):
            try:
                return read(self.index(run))
            except Gone:
                self._indexes.get(str(run), _Held).looked = 0.0
        raise NotReadable(f"{run} changes faster than it can be read; try again.")


def _listed(run: Storage) -> tuple[dict[str, list[Part]], str]:
    listed = {table: parts_of(run, table) for table in SCHEMAS}
    attempts = [name for name in run.names() if attempt_of_fingerprint(name) is not None]
    names = [*attempts, *(part.path for parts in listed.values() for part in parts)]
    return listed, hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()


def _values(run: Storage, table: str, part: Part, name: str, *more: str) -> tuple[Array, Array | None]:
    """float64 [rows] of a metric, NaN where there is none; and another column, if one is asked for."""
    columns = ("nan", "inf") if name == NONFINITE else (name,) if name in SCHEMAS[table] else ()
    rows = _read(run, table, part, *(columns or ("step",)), *more)
    values = [np.asarray(numbers_in(rows[column]), np.float64) for column in columns] or [np.full(len(rows), np.nan)]
    return np.sum(values, axis=0) if len(values) > 1 else values[0], numbers_in(rows[more[0]]) if more else None


def _is_tried(run: Storage, table: str, part: Part) -> Array:
    """bool [rows]: which rows are of what-if recipes."""
    codes, known = coded(_read(run, table, part, "scale_source")["scale_source"])
    return codes == known.index(WHAT_IF) if WHAT_IF in known else np.zeros(len(codes), bool)


def _read(run: Storage, table: str, part: Part, *columns: str) -> pa.Table:
    """Columns of a part.

    Raises:
        Gone: it is there no more.
        NotReadable: it is damaged.
    """
    try:
        rows = read_part(run, arrow_schema(table, {"attempt", *columns}), part)
    except FileNotFoundError:
        raise Gone from None
    if isinstance(rows, str):
        raise NotReadable(f"{part.path} cannot be read: {rows}.")
    return rows
