"""Read parts of a record as matrices of steps by tensors, one metric at a time. Caches are bounded.

A part never changes, and its name contains a checksum. So a cache entry with the part's name as key is always valid.
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
from ...record.outline import PartOutline
from ...record.parquet import GROUP
from ...record.parts import (
    PartDamagedError,
    PartGoneError,
    list_parts_of_table,
    read_part_columns,
    read_part_outline,
    read_part_rows,
)
from ...record.scan import TableStepIndex, read_operands_by_digest
from ...record.schema import SCHEMAS, Part, parse_attempt_number
from ...record.storage import FolderStorage
from ..cache import LRUCache
from ..web import UnreadableRecordError

Array = npt.NDArray[Any]
#: keys are the distinct layers, in order
Layers = dict[str, None]
#: `scale_source` of rows of what-if recipes
WHAT_IF = "what-if"
#: metric that is the sum of two columns: the number of values that are not finite
NONFINITE = "nonfinite"


class TensorKeys(tuple[tuple[str, str], ...]):
    """The (layer, role) of some tensors. Many parts share an instance, so that derived data is computed only once."""

    @cached_property
    def index_by_tensor(self) -> dict[tuple[str, str], int]:
        """Return the index of each tensor."""
        return {key: i for i, key in enumerate(self)}

    @cached_property
    def distinct_layers(self) -> Layers:
        """Return the layers of the tensors."""
        return dict.fromkeys(layer for layer, _ in self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


@dataclass(frozen=True)
class RowLayout:
    """The arrangement of a part's rows by step and tensor."""

    #: sampled steps, int64 [S], ascending
    steps: Array
    #: T tensors, in the order of the part
    tensors: TensorKeys
    #: row index of each tensor at each step, int32 [S, T], -1 without a row; None: all rows exist, ordered by step
    rows: Array | None

    @property
    def is_faster_by_tensor(self) -> bool:
        """Return True if reading one tensor is faster than reading all tensors."""
        return len(self.tensors) > GROUP

    def find_row(self, step: int, key: tuple[str, str]) -> int | None:
        """Return the row of a tensor at a step, or None if there is no row."""
        at, tensor = int(np.searchsorted(self.steps, step)), self.tensors.index_by_tensor.get(key)
        if tensor is None or at == len(self.steps) or self.steps[at] != step:
            return None
        row = at * len(self.tensors) + tensor if self.rows is None else int(self.rows[at, tensor])
        return None if row < 0 else row

    def arrange_values(self, values: Array, absent: float) -> Array:
        """Arrange values of rows, [rows], as [S, T], with `absent` for missing rows."""
        if self.rows is None:
            return values.reshape(len(self.steps), len(self.tensors))
        return np.append(values, values.dtype.type(absent))[self.rows]


@dataclass(frozen=True)
class CodedTexts:
    """A text column as indices into `known`, uint16 [S, T], 0 for null."""

    codes: Array
    known: list[str | None]


def convert_to_float_array(column: pa.ChunkedArray | pa.Array) -> Array:
    """Return a column of numbers as a read-only array, NaN for null.

    Use polars. `to_numpy` of pyarrow would import pandas, if installed, and delay the first answer.
    """
    return pl.Series(column).to_numpy()


def encode_texts(column: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """Return the codes of a text column (int32, -1 for null), and the string of each code."""
    whole = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.unify_dictionaries().combine_chunks() if whole.num_chunks else pa.array([], pa.string())
    coded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    indices = coded.indices.fill_null(-1) if coded.null_count else coded.indices
    return convert_to_float_array(indices).astype(np.int32, copy=False), coded.dictionary.to_pylist()


def list_columns_of_metric(table: str, metric: str) -> tuple[str, ...]:
    """Return the columns that `compute_metric_values` needs for a metric."""
    return ("nan", "inf") if metric == NONFINITE else (metric,) if metric in SCHEMAS[table] else ()


def compute_metric_values(rows: pa.Table, table: str, metric: str) -> Array:
    """Return the values of a metric, float64 [rows], NaN for missing values."""
    values = [np.asarray(convert_to_float_array(rows[name]), np.float64) for name in list_columns_of_metric(table, metric)]
    if not values:
        return np.full(len(rows), np.nan)
    # One of the two counts may be unknown, because msProbe counts only NaN.
    return np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0))


def mark_what_if_rows(rows: pa.Table) -> Array:
    """Return which rows belong to what-if recipes, bool [rows]."""
    codes, known = encode_texts(rows["scale_source"])
    return codes == known.index(WHAT_IF) if WHAT_IF in known else np.zeros(len(codes), bool)


def lay_out_rows(outline: PartOutline, names: Mapping[str, TensorKeys], tried: Array | None) -> RowLayout:
    """Return the layout of a part with rows in any order.

    Args:
        names: for each digest, layer and role of the rows of its steps.
        tried: rows to leave out, bool [rows], or None.
    """
    place: dict[tuple[str, str], int] = {}
    places = {digest: np.array([place.setdefault(key, len(place)) for key in keys]) for digest, keys in names.items()}
    tensor = np.concatenate([places[stretch.digest] for stretch in outline.stretches])
    step = np.repeat([stretch.step for stretch in outline.stretches], [stretch.rows for stretch in outline.stretches])
    rows = np.arange(len(step)) if tried is None else np.flatnonzero(~tried)
    steps, at = np.unique(step[rows], return_inverse=True)
    met, first, column = np.unique(tensor[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)  # in the order of their first rows
    keys = list(place)
    table = np.full((len(steps), len(met)), -1, np.int32)
    table[at, np.argsort(order)[column]] = rows
    return RowLayout(steps, TensorKeys(keys[i] for i in met[order].tolist()), table)


T = TypeVar("T")
#: maximum size in bytes of the cache of metrics, and of the cache of layouts
_HELD, _LAYOUTS = 384 << 20, 64 << 20
#: largest number of tensors in all cached lists of names
_TENSORS = 1 << 22
#: seconds before the list of a record's parts is read again
_LISTED = 1.0
#: number of records for which lists of parts are cached, and number of parts for which outlines are cached
_RECORDS, _PARTS = 256, 1 << 15
#: largest number of attempts to read a record while its parts are merged
_ATTEMPTS = 3


@dataclass(frozen=True)
class SampledStepIndex(TableStepIndex):
    """The sampled steps of a record, and the part of each step."""

    version: str = ""
    #: parts by table
    listed: dict[str, list[Part]] = field(default_factory=dict)
    #: warnings about the names of the record's files
    heard: list[str] = field(default_factory=list)


@dataclass
class _KnownIndex:
    """An index, and the time at which it was last checked."""

    looked: float = 0.0
    index: SampledStepIndex | None = None


class CachedPartReader:
    """A reader of the `metrics` table of records, or of a table with the same key columns. Results are cached."""

    def __init__(self, table: str = "metrics") -> None:
        """
        Args:
            table: a table in which step, layer and role identify a row. Rows of what-if recipes are left out.
        """
        self.table = table
        self._indexes: LRUCache[_KnownIndex] = LRUCache(_RECORDS)
        self._layouts: LRUCache[RowLayout] = LRUCache(_LAYOUTS, lambda held: 0 if held.rows is None else held.rows.nbytes)
        self._metrics: LRUCache[Array] = LRUCache(_HELD, lambda held: held.nbytes)
        self._harmed: dict[tuple[str, str, str], str] = {}
        self._outlines: LRUCache[PartOutline] = LRUCache(_PARTS)
        self._tensors: LRUCache[TensorKeys] = LRUCache(_TENSORS, len)
        self._texts: LRUCache[CodedTexts] = LRUCache(_HELD // 8, lambda held: held.codes.nbytes)

    def read_index(self, run: FolderStorage) -> SampledStepIndex:
        """Return the current sampled steps of a record.

        Raises:
            UnreadableRecordError: the folder is not readable.
        """
        held = self._indexes.get_or_make(str(run), _KnownIndex)
        known = held.index
        if known is not None and time.monotonic() - held.looked < _LISTED:
            return known
        known = held.index = self._looked(run, known)
        held.looked = time.monotonic()
        return known

    def _looked(self, run: FolderStorage, known: SampledStepIndex | None) -> SampledStepIndex:
        try:
            with capture_warnings() as heard:
                listed, version = _listed(run)
                # A temporary outage can look like damage, so read damaged parts again.
                if known is not None and known.version == version and not known.damaged:
                    return known
                found = TableStepIndex.read_from_outlines(run, self.table, partial(self._outline, run), listed[self.table])
        except Exception as error:  # drivers of remote file systems raise errors of their own
            raise UnreadableRecordError(
                f"{run} cannot be listed ({type(error).__name__}: {error}); look at the folder."
            ) from None
        damaged = {path: _why(path, reason) for path, reason in found.damaged.items()}
        return SampledStepIndex(found.steps, found.owner, damaged, version, listed, heard)

    def read_index_in_advance(self, run: FolderStorage) -> None:
        """Read the steps of a record in advance."""
        with contextlib.suppress(UnreadableRecordError):
            self.read_index(run)

    def get_known_index(self, run: FolderStorage) -> SampledStepIndex:
        """Return the known index of a record, or make an index from the names of parts, with only their first and
        last steps.
        """
        held = self._indexes.get_or_make(str(run), _KnownIndex).index
        if held is not None:
            return held
        with capture_warnings():
            listed, _ = _listed(run)
        owner = {step: part for part in listed[self.table] for step in (part.first, part.last)}
        return SampledStepIndex(np.array(sorted(owner), np.int64), owner, {}, listed=listed)

    def _outline(self, run: FolderStorage, part: Part) -> PartOutline:
        return self._outlines.get_or_make((str(run), part.path), lambda: read_part_outline(run, self.table, part))

    def read_outline(self, run: FolderStorage, part: Part) -> PartOutline:
        """Return the outline of a part's rows, from its footer."""
        with refuse_damaged_part(part):
            return self._outline(run, part)

    def read_layout(self, run: FolderStorage, part: Part) -> RowLayout:
        """Return the layout of a part's rows."""

        def make() -> RowLayout:
            outline = self.read_outline(run, part)
            steps = np.array([stretch.step for stretch in outline.stretches], np.int64)
            digests = {stretch.digest: stretch.rows for stretch in outline.stretches}
            rows = None if self.table == "metrics" else self.read_columns(run, part, "scale_source")
            tried = None if rows is None or not (found := mark_what_if_rows(rows)).any() else found
            if tried is None and len(digests) == 1 and (np.diff(steps) > 0).all():
                ((digest, count),) = digests.items()
                tensors = self._tensors.get_or_make(digest, lambda: self._names(run, part, outline)[digest])
                if len(tensors.index_by_tensor) == count:
                    return RowLayout(steps, tensors, None)
            layout = lay_out_rows(outline, self._names(run, part, outline), tried)
            return replace(
                layout, tensors=self._tensors.get_or_make(layout.tensors, lambda: layout.tensors)
            )  # shared by all parts

        return self._layouts.get_or_make((str(run), part.path), make)

    def _names(self, run: FolderStorage, part: Part, outline: PartOutline) -> dict[str, TensorKeys]:
        """Return for each digest the layer and role of the rows of its steps."""
        with refuse_damaged_part(part):
            tables = read_operands_by_digest(run, self.table, part, outline)
        return {
            digest: TensorKeys(zip(names["layer"].to_pylist(), names["role"].to_pylist(), strict=True))
            for digest, names in tables.items()
        }

    def read_metric(self, run: FolderStorage, part: Part, name: str) -> Array:
        """Return a metric in the layout of the part, float64 [S, T], NaN for missing values."""

        def make() -> Array:
            rows = self.read_columns(run, part, *list_columns_of_metric(self.table, name))
            return self.read_layout(run, part).arrange_values(compute_metric_values(rows, self.table, name), np.nan)

        return self._metrics.get_or_make((str(run), part.path, name), make)

    def read_columns(self, run: FolderStorage, part: Part, *names: str) -> pa.Table:
        """Return columns of all rows of a part, without caching."""
        with refuse_damaged_part(part):
            return read_part_columns(run, self.table, part, {"attempt", *names})[0]

    def read_few_rows(self, run: FolderStorage, part: Part, names: Sequence[str], places: Sequence[int]) -> pa.Table:
        """Return columns of a few rows of a part, without caching."""
        with refuse_damaged_part(part):
            return read_part_rows(run, self.table, part, names, places)

    def read_unless_damaged(self, run: FolderStorage, part: Part, what: str, read: Callable[[], T]) -> T | None:
        """Return the result of `read` for a part, or None if the part is damaged.

        `list_damaged_parts` then returns the reason.

        Args:
            what: name of the data to read, because only some data of a part may be damaged.
        """
        key = str(run), part.path, what
        try:
            found = read()
        except UnreadableRecordError as error:
            self._harmed[key] = str(error)
            return None
        self._harmed.pop(key, None)
        return found

    def read_layout_unless_damaged(self, run: FolderStorage, part: Part) -> RowLayout | None:
        """Return the layout of a part's rows, or None if the part is damaged."""
        return self.read_unless_damaged(run, part, "layout", lambda: self.read_layout(run, part))

    def read_metric_or_nan(self, run: FolderStorage, part: Part, layout: RowLayout, name: str) -> Array:
        """Return a metric as float64 [S, T], all NaN if the column is damaged."""
        found = self.read_unless_damaged(run, part, name, lambda: self.read_metric(run, part, name))
        return np.full((len(layout.steps), len(layout.tensors)), np.nan) if found is None else found

    def list_damaged_parts(self, run: FolderStorage) -> dict[str, str]:
        """Return the reasons why data of some parts is unreadable, by part."""
        return {part: why for (of, part, _), why in list(self._harmed.items()) if of == str(run)}

    def read_text_column(self, run: FolderStorage, part: Part, name: str) -> CodedTexts:
        """Return a text column in the layout of the part."""

        def make() -> CodedTexts:
            codes, known = encode_texts(self.read_columns(run, part, name)[name])
            return CodedTexts(self.read_layout(run, part).arrange_values((codes + 1).astype(np.uint16), 0), [None, *known])

        return self._texts.get_or_make((str(run), part.path, name), make)

    def read_with_retry(self, run: FolderStorage, read: Callable[[SampledStepIndex], T]) -> T:
        """Return the result of `read` for a record. If parts were merged meanwhile, read again.

        Raises:
            UnreadableRecordError: the record is unreadable, or changes too fast.
        """
        for _ in range(_ATTEMPTS):
            try:
                return read(self.read_index(run))
            except PartGoneError:
                self._indexes.get_or_make(str(run), _KnownIndex).looked = 0.0
        raise UnreadableRecordError(f"{run} changes too fast to be read; try again.")


@contextlib.contextmanager
def refuse_damaged_part(part: Part) -> Iterator[None]:
    """Convert an error about a damaged part into a refusal.

    Raises:
        UnreadableRecordError: the part is damaged.
    """
    try:
        yield
    except PartDamagedError as error:
        raise UnreadableRecordError(_why(part.path, str(error))) from None


def _why(path: str, reason: str) -> str:
    return f"{path} cannot be read: {reason}."


def _listed(run: FolderStorage) -> tuple[dict[str, list[Part]], str]:
    listed = {table: list_parts_of_table(run, table) for table in SCHEMAS}
    attempts = [name for name in run.list_names() if parse_attempt_number(name) is not None]
    names = [*attempts, *(part.path for parts in listed.values() for part in parts)]
    return listed, hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
