"""Read one tensor: its metrics over the steps, its histograms at a step, and its dumped files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ...analysis.formatting import make_jsonable
from ...core.threads import map_in_threads
from ...errors import capture_warnings
from ...record.dump_names import dumped_files, make_tensor_file_name
from ...record.outline import PartOutline
from ...record.parts import KEYS, may_contain_step, read_part_columns, read_whole_rows
from ...record.schema import Part
from ...record.storage import FolderStorage
from ..web import NotFoundError, quote_text, replace_nonfinite_by_null
from . import metadata
from .part_matrices import (
    CachedPartReader,
    RowLayout,
    SampledStepIndex,
    compute_metric_values,
    list_columns_of_metric,
    refuse_damaged_part,
)

#: text columns of a row of `metrics`
TEXTS = ("recipe", "format", "scale_source")
#: column, digest of the values of a step's rows, and index of the row; rows with equal keys have the same string
Key = tuple[str, str, int]


def read_tensor_timeline(
    parts: CachedPartReader, run: FolderStorage, layer: str, role: str, metrics: list[str]
) -> dict[str, Any]:
    """Return the metrics of a tensor at all steps at which it was sampled.

    Raises:
        NotFoundError: the record has no such tensor.
    """

    def read(index: SampledStepIndex) -> dict[str, Any]:
        """Read the parts that an index lists."""
        so_far = TextsSoFar()
        of_part = partial(_of_part, parts, run, index, (layer, role), metrics, so_far)
        columns: dict[str, list[Any]] = {name: [] for name in ("step", *metrics, *TEXTS)}
        for found in map_in_threads(of_part, list(index.steps_by_part)):
            for name, values in found.items():
                columns[name] += values
        if not columns["step"]:
            raise make_unknown_tensor_error(run, layer, role)
        order = np.argsort(columns["step"])
        told = {name: [values[i] for i in order] for name, values in columns.items()}
        texts = {name: so_far.resolved(told[name]) for name in TEXTS}
        return {"step": told["step"], "metrics": {name: told[name] for name in metrics}, **texts}

    return parts.read_with_retry(run, read)


def _of_part(
    parts: CachedPartReader,
    run: FolderStorage,
    index: SampledStepIndex,
    key: tuple[str, str],
    metrics: list[str],
    texts: TextsSoFar,
    part: Part,
) -> dict[str, list[Any]]:
    """Return step, metrics and texts of a tensor at a part's steps, as columns."""
    if (layout := parts.read_layout_unless_damaged(run, part)) is None:
        return {}
    places = {step: row for step in index.steps_by_part[part] if (row := layout.find_row(step, key)) is not None}
    if not places:
        return {}
    if layout.is_faster_by_tensor:
        return {"step": list(places), **_of_rows(parts, run, part, list(places.values()), metrics, texts)}
    return {"step": list(places), **_of_matrices(parts, run, part, layout, list(places), key, metrics)}


class TextsSoFar:
    """Strings of a tensor, each read only once. The footers of the Parquet parts show which samples have the same string.

    Parts are read in any order, so keys represent strings until all parts are read.
    """

    def __init__(self) -> None:
        self._known: dict[Key, str | None] = {}

    def look_up_texts(self, outline: PartOutline, places: Sequence[int]) -> dict[str, list[str | Key]]:
        """Return the strings of some rows, or keys of these strings, by column. Leave out columns that must be read."""
        told: dict[str, list[str | Key]] = {}
        for name in TEXTS:
            if type(text := outline.same.get(name)) is str:
                told[name] = [text] * len(places)
            elif self._known.keys() >= set(keys := self._keys(outline, name, places)) and keys:
                told[name] = list(keys)
        return told

    def keep_texts(
        self, outline: PartOutline, places: Sequence[int], rows: pa.Table, names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Store strings that were read, and return them by column. For a damaged column, return keys, because another part
        may have the same strings.
        """
        found: dict[str, list[Any]] = {}
        for name in names:
            keys, texts = self._keys(outline, name, places), rows[name].to_pylist()
            if rows[name].type != pa.null():
                self._known.update(zip(keys, texts, strict=False))
            found[name] = list(keys) or texts
        return found

    def resolved(self, texts: Sequence[str | Key | None]) -> list[str | None]:
        """Return the strings of some keys, or None for unreadable strings."""
        return [self._known.get(text) if isinstance(text, tuple) else text for text in texts]

    def _keys(self, outline: PartOutline, name: str, places: Sequence[int]) -> list[Key]:
        """Return the key of each row, or no keys if the footer has no digests."""
        patterns = outline.patterns.get(name)
        return [(name, patterns[stretch], row) for stretch, row in map(outline.locate_row, places)] if patterns else []


def _of_rows(
    parts: CachedPartReader, run: FolderStorage, part: Part, places: Sequence[int], metrics: list[str], so_far: TextsSoFar
) -> dict[str, list[Any]]:
    """Return metrics and strings. Read only the tensor's rows."""
    names = dict.fromkeys(column for name in metrics for column in list_columns_of_metric(parts.table, name))
    outline = parts.read_outline(run, part)
    texts = so_far.look_up_texts(outline, places)
    missing = [name for name in TEXTS if name not in texts]
    rows = _some_rows(parts, run, part, (*names, *missing), places)
    values = {name: replace_nonfinite_by_null(compute_metric_values(rows, parts.table, name)) for name in metrics}
    return values | texts | so_far.keep_texts(outline, places, rows, missing)


def _some_rows(
    parts: CachedPartReader, run: FolderStorage, part: Part, names: Sequence[str], places: Sequence[int]
) -> pa.Table:
    """Return columns of a few rows, with null for damaged columns."""
    read = partial(parts.read_few_rows, run, part)
    if (whole := parts.read_unless_damaged(run, part, "rows", lambda: read(names, places))) is not None:
        return whole
    alone = {name: parts.read_unless_damaged(run, part, name, partial(read, (name,), places)) for name in names}
    none = pa.nulls(len(places))
    return pa.table({name: none if rows is None else rows[name] for name, rows in alone.items()})


def _of_matrices(
    parts: CachedPartReader,
    run: FolderStorage,
    part: Part,
    layout: RowLayout,
    steps: Sequence[int],
    key: tuple[str, str],
    metrics: list[str],
) -> dict[str, list[Any]]:
    """Return metrics and strings from the cached matrices of all tensors."""
    at, tensor = np.searchsorted(layout.steps, steps), layout.tensors.index_by_tensor[key]
    found = {
        name: replace_nonfinite_by_null(parts.read_metric_or_nan(run, part, layout, name)[at, tensor]) for name in metrics
    }
    for name in TEXTS:
        held = parts.read_unless_damaged(run, part, name, partial(parts.read_text_column, run, part, name))
        found[name] = [held.known[code] for code in held.codes[at, tensor]] if held else [None] * len(steps)
    return found


#: columns of a histogram in an answer
_OF_HISTOGRAM = ("recipe", "format", "dtype", "rounded", "scale", "bins", "counts")
#: number of rows to decode at a time, for metrics and for histograms
_METRICS_AT_ONCE, _HISTOGRAMS_AT_ONCE = 1 << 13, 32


def make_unknown_tensor_error(run: FolderStorage, layer: str, role: str) -> NotFoundError:
    """Return the error for a request for a tensor that is not in the record."""
    return NotFoundError(f"The record at {run} has no metrics of {role} of {quote_text(layer)}; choose a tensor of its map.")


def find_nearest_step(run: FolderStorage, index: SampledStepIndex, step: int) -> int:
    """Return the nearest sampled step.

    Raises:
        NotFoundError: no step was sampled.
    """
    if not len(index.steps):
        raise NotFoundError(f"The record at {run} has no sampled step yet; wait for the first one.")
    return index.find_nearest_step(step)


def read_tensor_histograms(parts: CachedPartReader, run: FolderStorage, layer: str, role: str, step: int) -> dict[str, Any]:
    """Return a tensor's histograms at the nearest sampled step (one row for each scale), and the recorded metrics.

    Raises:
        NotFoundError: the record has no such tensor at that step, or no histogram of the tensor.
    """

    def read(index: SampledStepIndex) -> dict[str, Any]:
        at = find_nearest_step(run, index, step)
        part = index.owner[at]
        row = parts.read_layout(run, part).find_row(at, (layer, role))
        if row is None:
            raise make_unknown_tensor_error(run, layer, f"step {at} of {role}")
        with refuse_damaged_part(part):
            recorded = read_whole_rows(run, parts.table, part, [row], _METRICS_AT_ONCE)[0]
        rows = _histograms(run, metadata.TABLES[parts.table], index, part.attempt, at, layer, role)
        if not rows:
            raise NotFoundError(_why_no_histogram(run, layer, role, at, index))
        told = [{name: make_jsonable(row[name]) for name in _OF_HISTOGRAM} for row in rows]
        return {"step": at, "rows": told, "recorded": make_jsonable(recorded)}

    return parts.read_with_retry(run, read)


def _histograms(
    run: FolderStorage, table: str, index: SampledStepIndex, attempt: int, step: int, layer: str, role: str
) -> list[dict[str, Any]]:
    for part in index.listed[table]:
        if part.attempt != attempt or not may_contain_step(table, part, step):
            continue
        with refuse_damaged_part(part):
            names = pl.DataFrame(pl.from_arrow(read_part_columns(run, table, part, KEYS)[0])).with_row_index("row")
            named = [pl.col(name).cast(pl.String) == text for name, text in (("layer", layer), ("role", role))]
            if rows := names.filter(pl.col("step") == step, *named)["row"].to_list():
                return read_whole_rows(run, table, part, rows, _HISTOGRAMS_AT_ONCE)
    return []


def _why_no_histogram(run: FolderStorage, layer: str, role: str, step: int, index: SampledStepIndex) -> str:
    if not index.listed["histograms"]:
        return f"The record at {run} has no histograms; record the run with histograms to see distributions."
    if "*" in layer.split("."):
        return f"{quote_text(layer)} stands for all experts of a layer, which have no common histogram; choose an expert."
    return f"The record has no histogram of {role} of {quote_text(layer)} at step {step}; choose another step or tensor."


#: largest number of files of one tensor in an answer
_MOST = 50
Files = list[tuple[int, int, int, str]]


def find_dump_files(run: FolderStorage) -> Files:
    """Return all files of dumped tensors: attempt, step, rank and name of each, ascending."""
    with capture_warnings():
        return sorted(dumped_files(run))


def list_latest_dumps_of_tensor(files: Files, layer: str, role: str) -> dict[str, Any]:
    """Return the latest files of a tensor, and the number of all its files.

    Args:
        files: files of a record. Two layers whose names are equal in file names count as one.

    Returns:
        `count`, and `files` with the `step`, `rank` and `name` (below the record's folder) of each file, ascending.
    """
    mine = [file for file in files if f".{make_tensor_file_name(layer, role)}." in file[3].rpartition("/")[2]]
    return {
        "count": len(mine),
        "files": [{"step": step, "rank": rank, "name": name} for _, step, rank, name in mine[-_MOST:]],
    }
