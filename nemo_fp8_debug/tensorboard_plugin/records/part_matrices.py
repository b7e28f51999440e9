"""Parts of a record as matrices, steps x tensors, a metric at a time; what was read is held within bounds.

A part never changes and its name carries a checksum, so that what is held under its name is always valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ...errors import hearing
from ...record.outline import Outline
from ...record.parts import (
    PartDamagedError,
    PartGoneError,
    list_parts,
    read_columns,
    read_outline,
    read_rows,
)
from ...record.schema import SCHEMAS, Part, attempt_of_fingerprint
from ...record.storage import Storage
from ...record.table_index import TableIndex, read_new_names
from ..web.errors import NotReadable
from .cache import Cache
from .extent import Extent
from .layouts import Array, Layout, Tensors, Texts, coded, columns_of, is_tried, lay_out, numbers_in, values_of

T = TypeVar("T")

#: bytes of metrics that are held, and of where the rows of parts are
_HELD, _LAYOUTS = 384 << 20, 64 << 20
#: names that are held
_TENSORS = 1 << 22
#: bytes of where values lie
_EXTENTS = 32 << 20
#: seconds for which the list of a record's parts is taken as it is
_LISTED = 1.0
#: records whose parts are known at a time, and parts whose steps are
_RECORDS, _PARTS = 256, 1 << 15
#: times that a record is read again where parts were merged meanwhile
_ATTEMPTS = 3


@dataclass(frozen=True)
class Index(TableIndex):
    """The sampled steps of a record, and which part has each."""

    version: str = ""
    #: by table
    listed: dict[str, list[Part]] = field(default_factory=dict)
    #: what is out of the ordinary about the names of its files
    heard: list[str] = field(default_factory=list)


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
        self._layouts: Cache[Layout] = Cache(_LAYOUTS, lambda held: 0 if held.rows is None else held.rows.nbytes)
        self._metrics: Cache[Array] = Cache(_HELD, lambda held: held.nbytes)
        self._extents: Cache[Extent] = Cache(_EXTENTS, lambda held: held.nbytes)
        self._harmed: dict[tuple[str, str, str], str] = {}
        self._outlines: Cache[Outline] = Cache(_PARTS, lambda _: 1)
        self._tensors: Cache[Tensors] = Cache(_TENSORS, len)
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
        try:
            with hearing() as heard:
                listed, version = _listed(run)
                # Damage may have been an outage: what could not be read is tried again.
                if known is not None and known.version == version and not known.damaged:
                    return known
                found = TableIndex.read(run, self.table, partial(self._outline, run), listed[self.table])
        except Exception as error:  # every driver of a remote file system has errors of its own
            raise NotReadable(f"{run} cannot be listed ({type(error).__name__}: {error}); look at the folder.") from None
        damaged = {path: _why(path, reason) for path, reason in found.damaged.items()}
        return Index(found.steps, found.owner, damaged, version, listed, heard)

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
        return Index(np.array(sorted(owner), np.int64), owner, {}, listed=listed)

    def _outline(self, run: Storage, part: Part) -> Outline:
        return self._outlines.get((str(run), part.path), lambda: read_outline(run, self.table, part))

    def outline(self, run: Storage, part: Part) -> Outline:
        """What the footer of a part tells of its rows."""
        with answering(part):
            return self._outline(run, part)

    def layout(self, run: Storage, part: Part) -> Layout:
        """Where a part's rows are."""

        def make() -> Layout:
            outline = self.outline(run, part)
            steps = np.array([stretch.step for stretch in outline.stretches], np.int64)
            digests = {stretch.digest: stretch.rows for stretch in outline.stretches}
            rows = None if self.table == "metrics" else self.columns(run, part, "scale_source")
            tried = None if rows is None or not (found := is_tried(rows)).any() else found
            if tried is None and len(digests) == 1 and (np.diff(steps) > 0).all():
                ((digest, count),) = digests.items()
                tensors = self._tensors.get(digest, lambda: self._names(run, part, outline)[digest])
                if len(tensors.places) == count:
                    return Layout(steps, tensors, None)
            layout = lay_out(outline, self._names(run, part, outline), tried)
            return replace(layout, tensors=self._tensors.get(layout.tensors, lambda: layout.tensors))  # one for all parts

        return self._layouts.get((str(run), part.path), make)

    def _names(self, run: Storage, part: Part, outline: Outline) -> dict[str, Tensors]:
        """Layer and role of the rows of stretches, by digest."""
        with answering(part):
            tables = read_new_names(run, self.table, part, outline)
        return {
            digest: Tensors(zip(names["layer"].to_pylist(), names["role"].to_pylist(), strict=True))
            for digest, names in tables.items()
        }

    def metric(self, run: Storage, part: Part, name: str) -> Array:
        """float64 [S, T], as the layout of the part has them; NaN where there is none."""

        def make() -> Array:
            rows = self.columns(run, part, *columns_of(self.table, name))
            return self.layout(run, part).spread(values_of(rows, self.table, name), np.nan)

        return self._metrics.get((str(run), part.path, name), make)

    def columns(self, run: Storage, part: Part, *names: str) -> pa.Table:
        """Columns of a part, all its rows; they are not held."""
        with answering(part):
            return read_columns(run, self.table, part, {"attempt", *names})[0]

    def some_rows(self, run: Storage, part: Part, names: Sequence[str], places: Sequence[int]) -> pa.Table:
        """Columns of a few rows of a part; they are not held."""
        with answering(part):
            return read_rows(run, self.table, part, names, places)

    def extent(self, run: Storage, part: Part, name: str, steps: Sequence[int]) -> Extent:
        """Where the values of a metric lie at some steps of a part."""

        def make() -> Extent:
            whole = len(steps) == len(self.outline(run, part).steps)
            is_mixed = self.table != "metrics"
            others = [*(() if whole else ("step",)), *(("scale_source",) if is_mixed else ())]
            rows = self.columns(run, part, *columns_of(self.table, name), *others)
            values = values_of(rows, self.table, name)
            values = np.where(is_tried(rows), np.nan, values) if is_mixed else values
            return Extent.of(values if whole else values[np.isin(numbers_in(rows["step"]), steps)])

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
            codes, known = coded(self.columns(run, part, name)[name])
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
            except PartGoneError:
                self._indexes.get(str(run), _Held).looked = 0.0
        raise NotReadable(f"{run} changes faster than it can be read; try again.")


@contextlib.contextmanager
def answering(part: Part) -> Iterator[None]:
    """Say in an answer that a part is damaged.

    Raises:
        NotReadable: it is.
    """
    try:
        yield
    except PartDamagedError as error:
        raise NotReadable(_why(part.path, str(error))) from None


def _why(path: str, reason: str) -> str:
    return f"{path} cannot be read: {reason}."


def _listed(run: Storage) -> tuple[dict[str, list[Part]], str]:
    listed = {table: list_parts(run, table) for table in SCHEMAS}
    attempts = [name for name in run.names() if attempt_of_fingerprint(name) is not None]
    names = [*attempts, *(part.path for parts in listed.values() for part in parts)]
    return listed, hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
