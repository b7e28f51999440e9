"""Parts of a record as matrices, steps x tensors, a metric at a time; what was read is held within bounds.

A part never changes and its name carries a checksum, so that what is held under its name is always valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ...errors import capture_warnings
from ...record.outline import Outline
from ...record.parquet import GROUP
from ...record.parts import PartDamagedError, PartGoneError, list_parts, read_columns, read_outline, read_rows
from ...record.scan import TableIndex, read_new_names
from ...record.schema import SCHEMAS, Part, parse_attempt
from ...record.storage import Storage
from ..cache import Cache
from ..web import NotReadable

Array = npt.NDArray[Any]
#: different layers in order, as keys
Layers = dict[str, None]
#: source of the scales of rows of what-if recipes
WHAT_IF = "what-if"
#: how many values are not finite: two columns as one
NONFINITE = "nonfinite"


class Tensors(tuple[tuple[str, str], ...]):
    """(layer, role) of tensors. Many parts share them, so that what is known of them is found once."""

    @cached_property
    def places(self) -> dict[tuple[str, str], int]:
        """Return the place of each."""
        return {key: i for i, key in enumerate(self)}

    @cached_property
    def layers(self) -> Layers:
        """Return their layers."""
        return dict.fromkeys(layer for layer, _ in self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


@dataclass(frozen=True)
class Layout:
    """Where the rows of a part are."""

    #: int64 [S], ascending
    steps: Array
    #: of T tensors, in the order of the part
    tensors: Tensors
    #: int32 [S, T]: the row of each, -1 where there is none; None: rows lie step by step, complete
    rows: Array | None

    @property
    def is_wide(self) -> bool:
        """Return True if reading one tensor takes less than reading all."""
        return len(self.tensors) > GROUP

    def row(self, step: int, key: tuple[str, str]) -> int | None:
        """Return the row of a tensor at a step; None if it has none."""
        at, tensor = int(np.searchsorted(self.steps, step)), self.tensors.places.get(key)
        if tensor is None or at == len(self.steps) or self.steps[at] != step:
            return None
        row = at * len(self.tensors) + tensor if self.rows is None else int(self.rows[at, tensor])
        return None if row < 0 else row

    def spread(self, values: Array, absent: float) -> Array:
        """Return [rows] as [S, T]."""
        if self.rows is None:
            return values.reshape(len(self.steps), len(self.tensors))
        return np.append(values, values.dtype.type(absent))[self.rows]


@dataclass(frozen=True)
class CodedTexts:
    """A column of text: uint16 codes [S, T] into `known`, 0 where there is none."""

    codes: Array
    known: list[str | None]


def read_numbers(column: pa.ChunkedArray | pa.Array) -> Array:
    """Return a column of numbers, NaN for null; read-only.

    Through polars: `to_numpy` of pyarrow imports pandas where it is installed, and the first answer would wait for that.
    """
    return pl.Series(column).to_numpy()


def encode_texts(column: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """Return codes int32, -1 for null, and what they stand for."""
    whole = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.unify_dictionaries().combine_chunks() if whole.num_chunks else pa.array([], pa.string())
    coded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    indices = coded.indices.fill_null(-1) if coded.null_count else coded.indices
    return read_numbers(indices).astype(np.int32, copy=False), coded.dictionary.to_pylist()


def list_columns(table: str, metric: str) -> tuple[str, ...]:
    """Return the columns that `compute_values` takes."""
    return ("nan", "inf") if metric == NONFINITE else (metric,) if metric in SCHEMAS[table] else ()


def compute_values(rows: pa.Table, table: str, metric: str) -> Array:
    """Return float64 [rows] of a metric, NaN where there is none."""
    values = [np.asarray(read_numbers(rows[name]), np.float64) for name in list_columns(table, metric)]
    if not values:
        return np.full(len(rows), np.nan)
    # Of two counts one may be unknown: msProbe counts NaN alone.
    return np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0))


def find_tried(rows: pa.Table) -> Array:
    """Return bool [rows]: which rows are of what-if recipes."""
    codes, known = encode_texts(rows["scale_source"])
    return codes == known.index(WHAT_IF) if WHAT_IF in known else np.zeros(len(codes), bool)


def lay_out_rows(outline: Outline, names: Mapping[str, Tensors], tried: Array | None) -> Layout:
    """Return where the rows of a part are, whatever their order.

    Args:
        names: layer and role of the rows of stretches, by digest.
        tried: bool [rows]: which are left out; None: none.
    """
    place: dict[tuple[str, str], int] = {}
    places = {digest: np.array([place.setdefault(key, len(place)) for key in keys]) for digest, keys in names.items()}
    tensor = np.concatenate([places[stretch.digest] for stretch in outline.stretches])
    step = np.repeat([stretch.step for stretch in outline.stretches], [stretch.rows for stretch in outline.stretches])
    rows = np.arange(len(step)) if tried is None else np.flatnonzero(~tried)
    steps, at = np.unique(step[rows], return_inverse=True)
    met, first, column = np.unique(tensor[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they are first met
    keys = list(place)
    table = np.full((len(steps), len(met)), -1, np.int32)
    table[at, np.argsort(order)[column]] = rows
    return Layout(steps, Tensors(keys[i] for i in met[order].tolist()), table)


T = TypeVar("T")
#: bytes of metrics that are held, and of where the rows of parts are
_HELD, _LAYOUTS = 384 << 20, 64 << 20
#: names that are held
_TENSORS = 1 << 22
#: seconds for which the list of a record's parts is taken as it is
_LISTED = 1.0
#: records whose parts are known at a time, and parts whose steps are
_RECORDS, _PARTS = 256, 1 << 15
#: times that a record is read again where parts were merged meanwhile
_ATTEMPTS = 3


@dataclass(frozen=True)
class RecordIndex(TableIndex):
    """The sampled steps of a record, and which part has each."""

    version: str = ""
    #: by table
    listed: dict[str, list[Part]] = field(default_factory=dict)
    #: what is out of the ordinary about the names of its files
    heard: list[str] = field(default_factory=list)


@dataclass
class _KnownIndex:
    """An index, and when it was looked whether it still holds."""

    looked: float = 0.0
    index: RecordIndex | None = None


class PartMatrices:
    """Reads the `metrics` of records, or another table of the same form."""

    def __init__(self, table: str = "metrics") -> None:
        """
        Args:
            table: whose rows are told apart by step, layer and role; those of what-if recipes are left out.
        """
        self.table = table
        self._indexes: Cache[_KnownIndex] = Cache(_RECORDS)
        self._layouts: Cache[Layout] = Cache(_LAYOUTS, lambda held: 0 if held.rows is None else held.rows.nbytes)
        self._metrics: Cache[Array] = Cache(_HELD, lambda held: held.nbytes)
        self._harmed: dict[tuple[str, str, str], str] = {}
        self._outlines: Cache[Outline] = Cache(_PARTS)
        self._tensors: Cache[Tensors] = Cache(_TENSORS, len)
        self._texts: Cache[CodedTexts] = Cache(_HELD // 8, lambda held: held.codes.nbytes)

    def index(self, run: Storage) -> RecordIndex:
        """Return the sampled steps of a record, as they are now.

        Raises:
            NotReadable: the folder cannot be listed.
        """
        held = self._indexes.get(str(run), _KnownIndex)
        known = held.index
        if known is not None and time.monotonic() - held.looked < _LISTED:
            return known
        known = held.index = self._looked(run, known)
        held.looked = time.monotonic()
        return known

    def _looked(self, run: Storage, known: RecordIndex | None) -> RecordIndex:
        try:
            with capture_warnings() as heard:
                listed, version = _listed(run)
                # Damage may have been an outage: what could not be read is tried again.
                if known is not None and known.version == version and not known.damaged:
                    return known
                found = TableIndex.read(run, self.table, partial(self._outline, run), listed[self.table])
        except Exception as error:  # every driver of a remote file system has errors of its own
            raise NotReadable(f"{run} cannot be listed ({type(error).__name__}: {error}); look at the folder.") from None
        damaged = {path: _why(path, reason) for path, reason in found.damaged.items()}
        return RecordIndex(found.steps, found.owner, damaged, version, listed, heard)

    def warm(self, run: Storage) -> None:
        """Learn the steps of a record before somebody asks."""
        with contextlib.suppress(NotReadable):
            self.index(run)

    def glance(self, run: Storage) -> RecordIndex:
        """Return what the names of parts say, if no more is known: the first and last step of each, damaged or not."""
        held = self._indexes.get(str(run), _KnownIndex).index
        if held is not None:
            return held
        with capture_warnings():
            listed, _ = _listed(run)
        owner = {step: part for part in listed[self.table] for step in (part.first, part.last)}
        return RecordIndex(np.array(sorted(owner), np.int64), owner, {}, listed=listed)

    def _outline(self, run: Storage, part: Part) -> Outline:
        return self._outlines.get((str(run), part.path), lambda: read_outline(run, self.table, part))

    def outline(self, run: Storage, part: Part) -> Outline:
        """Return what the footer of a part says of its rows."""
        with report_damage(part):
            return self._outline(run, part)

    def layout(self, run: Storage, part: Part) -> Layout:
        """Return where a part's rows are."""

        def make() -> Layout:
            outline = self.outline(run, part)
            steps = np.array([stretch.step for stretch in outline.stretches], np.int64)
            digests = {stretch.digest: stretch.rows for stretch in outline.stretches}
            rows = None if self.table == "metrics" else self.columns(run, part, "scale_source")
            tried = None if rows is None or not (found := find_tried(rows)).any() else found
            if tried is None and len(digests) == 1 and (np.diff(steps) > 0).all():
                ((digest, count),) = digests.items()
                tensors = self._tensors.get(digest, lambda: self._names(run, part, outline)[digest])
                if len(tensors.places) == count:
                    return Layout(steps, tensors, None)
            layout = lay_out_rows(outline, self._names(run, part, outline), tried)
            return replace(layout, tensors=self._tensors.get(layout.tensors, lambda: layout.tensors))  # one for all parts

        return self._layouts.get((str(run), part.path), make)

    def _names(self, run: Storage, part: Part, outline: Outline) -> dict[str, Tensors]:
        """Layer and role of the rows of stretches, by digest."""
        with report_damage(part):
            tables = read_new_names(run, self.table, part, outline)
        return {
            digest: Tensors(zip(names["layer"].to_pylist(), names["role"].to_pylist(), strict=True))
            for digest, names in tables.items()
        }

    def metric(self, run: Storage, part: Part, name: str) -> Array:
        """Return float64 [S, T], as the layout of the part has them; NaN where there is none."""

        def make() -> Array:
            rows = self.columns(run, part, *list_columns(self.table, name))
            return self.layout(run, part).spread(compute_values(rows, self.table, name), np.nan)

        return self._metrics.get((str(run), part.path, name), make)

    def columns(self, run: Storage, part: Part, *names: str) -> pa.Table:
        """Return columns of a part, all its rows; they are not held."""
        with report_damage(part):
            return read_columns(run, self.table, part, {"attempt", *names})[0]

    def some_rows(self, run: Storage, part: Part, names: Sequence[str], places: Sequence[int]) -> pa.Table:
        """Return columns of a few rows of a part; they are not held."""
        with report_damage(part):
            return read_rows(run, self.table, part, names, places)

    def read_unless_damaged(self, run: Storage, part: Part, what: str, read: Callable[[], T]) -> T | None:
        """Return what `read` finds in a part; None if that is damaged, which `list_damaged` then reports.

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

    def find_layout(self, run: Storage, part: Part) -> Layout | None:
        """Return where the rows of a part are; None where that is damaged."""
        return self.read_unless_damaged(run, part, "layout", lambda: self.layout(run, part))

    def find_metric(self, run: Storage, part: Part, layout: Layout, name: str) -> Array:
        """Return a metric as float64 [S, T]; NaN where the column is damaged."""
        found = self.read_unless_damaged(run, part, name, lambda: self.metric(run, part, name))
        return np.full((len(layout.steps), len(layout.tensors)), np.nan) if found is None else found

    def list_damaged(self, run: Storage) -> dict[str, str]:
        """Return by name what is wrong with parts of which some columns were found damaged."""
        return {part: why for (of, part, _), why in list(self._harmed.items()) if of == str(run)}

    def texts(self, run: Storage, part: Part, name: str) -> CodedTexts:
        """Return a column of text, as the layout of the part has it."""

        def make() -> CodedTexts:
            codes, known = encode_texts(self.columns(run, part, name)[name])
            return CodedTexts(self.layout(run, part).spread((codes + 1).astype(np.uint16), 0), [None, *known])

        return self._texts.get((str(run), part.path, name), make)

    def read_settled(self, run: Storage, read: Callable[[RecordIndex], T]) -> T:
        """Return what `read` makes of a record; read once more if parts were merged meanwhile.

        Raises:
            NotReadable: it cannot be read, or changes faster than it is read.
        """
        for _ in range(_ATTEMPTS):
            try:
                return read(self.index(run))
            except PartGoneError:
                self._indexes.get(str(run), _KnownIndex).looked = 0.0
        raise NotReadable(f"{run} changes faster than it can be read; try again.")


@contextlib.contextmanager
def report_damage(part: Part) -> Iterator[None]:
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
    attempts = [name for name in run.names() if parse_attempt(name) is not None]
    names = [*attempts, *(part.path for parts in listed.values() for part in parts)]
    return listed, hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
