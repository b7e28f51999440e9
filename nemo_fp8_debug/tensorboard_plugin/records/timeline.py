"""Metrics of one tensor over the steps of a record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ...core.threads import ahead
from ...record.outline import Outline
from ...record.schema import Part
from ...record.storage import Storage
from ..web.json_values import numbers
from .layouts import Layout, columns_of, values_of
from .part_matrices import Index, Parts
from .tables import layout_of, metric_of, no_such_tensor

#: of a row of `metrics`, what stands beside the metrics
TEXTS = ("recipe", "format", "scale_source")
#: column, and pattern of a stretch of rows and place in it: what rows have the same text
Key = tuple[str, str, int]


def timeline(parts: Parts, run: Storage, layer: str, role: str, metrics: list[str]) -> dict[str, Any]:
    """Metrics of one tensor at all steps that have it.

    Raises:
        NotThere: the record has no such tensor.
    """

    def read(index: Index) -> dict[str, Any]:
        """Of the parts that an index lists."""
        so_far = TextsSoFar()
        of_part = partial(_of_part, parts, run, index, (layer, role), metrics, so_far)
        columns: dict[str, list[Any]] = {name: [] for name in ("step", *metrics, *TEXTS)}
        for found in ahead(of_part, list(index.held)):
            for name, values in found.items():
                columns[name] += values
        if not columns["step"]:
            raise no_such_tensor(run, layer, role)
        order = np.argsort(columns["step"])
        told = {name: [values[i] for i in order] for name, values in columns.items()}
        texts = {name: so_far.resolved(told[name]) for name in TEXTS}
        return {"step": told["step"], "metrics": {name: told[name] for name in metrics}, **texts}

    return parts.settled(run, read)


def _of_part(
    parts: Parts, run: Storage, index: Index, key: tuple[str, str], metrics: list[str], texts: TextsSoFar, part: Part
) -> dict[str, list[Any]]:
    """Step, metrics and texts, at those of a part's steps that have the tensor."""
    if (layout := layout_of(parts, run, part)) is None:
        return {}
    places = {step: row for step in index.held[part] if (row := layout.row(step, key)) is not None}
    if not places:
        return {}
    if layout.is_wide:
        return {"step": list(places), **_of_rows(parts, run, part, list(places.values()), metrics, texts)}
    return {"step": list(places), **_of_matrices(parts, run, part, layout, list(places), key, metrics)}


class TextsSoFar:
    """Texts of a tensor. Those of most samples are the same, and footers tell of which: these are read once.

    Parts are read in any order, so that a text stands as its key until all of them are.
    """

    def __init__(self) -> None:
        self._known: dict[Key, str | None] = {}

    def told(self, outline: Outline, places: Sequence[int]) -> dict[str, list[str | Key]]:
        """By column of which nothing has to be read, those of some rows of a part."""
        told: dict[str, list[str | Key]] = {}
        for name in TEXTS:
            if type(text := outline.same.get(name)) is str:
                told[name] = [text] * len(places)
            elif self._known.keys() >= set(keys := self._keys(outline, name, places)) and keys:
                told[name] = list(keys)
        return told

    def kept(self, outline: Outline, places: Sequence[int], rows: pa.Table, names: Sequence[str]) -> dict[str, list[Any]]:
        """Those of a part that were read; a column that is damaged has no values, which another part may have."""
        found: dict[str, list[Any]] = {}
        for name in names:
            keys, texts = self._keys(outline, name, places), rows[name].to_pylist()
            if rows[name].type != pa.null():
                self._known.update(zip(keys, texts, strict=False))
            found[name] = list(keys) or texts
        return found

    def resolved(self, texts: Sequence[str | Key | None]) -> list[str | None]:
        """The texts that keys stand for; None: they could not be read."""
        return [self._known.get(text) if isinstance(text, tuple) else text for text in texts]

    def _keys(self, outline: Outline, name: str, places: Sequence[int]) -> list[Key]:
        """Of each row; empty where the footer does not tell."""
        patterns = outline.patterns.get(name)
        return [(name, patterns[stretch], row) for stretch, row in map(outline.find, places)] if patterns else []


def _of_rows(
    parts: Parts, run: Storage, part: Part, places: Sequence[int], metrics: list[str], so_far: TextsSoFar
) -> dict[str, list[Any]]:
    """Read from the few rows of the tensor."""
    names = dict.fromkeys(column for name in metrics for column in columns_of(parts.table, name))
    outline = parts.outline(run, part)
    texts = so_far.told(outline, places)
    missing = [name for name in TEXTS if name not in texts]
    rows = _some_rows(parts, run, part, (*names, *missing), places)
    values = {name: numbers(values_of(rows, parts.table, name)) for name in metrics}
    return values | texts | so_far.kept(outline, places, rows, missing)


def _some_rows(parts: Parts, run: Storage, part: Part, names: Sequence[str], places: Sequence[int]) -> pa.Table:
    """Columns of a few rows; of those that are damaged, none of their values."""
    read = partial(parts.some_rows, run, part)
    if (whole := parts.unless_damaged(run, part, "rows", lambda: read(names, places))) is not None:
        return whole
    alone = {name: parts.unless_damaged(run, part, name, partial(read, (name,), places)) for name in names}
    none = pa.nulls(len(places))
    return pa.table({name: none if rows is None else rows[name] for name, rows in alone.items()})


def _of_matrices(
    parts: Parts, run: Storage, part: Part, layout: Layout, steps: Sequence[int], key: tuple[str, str], metrics: list[str]
) -> dict[str, list[Any]]:
    """Read from what is held of all tensors."""
    at, tensor = np.searchsorted(layout.steps, steps), layout.tensors.places[key]
    found = {name: numbers(metric_of(parts, run, part, layout, name)[at, tensor]) for name in metrics}
    for name in TEXTS:
        held = parts.unless_damaged(run, part, name, partial(parts.texts, run, part, name))
        found[name] = [held.known[code] for code in held.codes[at, tensor]] if held else [None] * len(steps)
    return found
