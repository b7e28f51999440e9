"""Answers read from the metrics of a record: what it holds, its map, and single tensors at a step."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from ...analysis.comparison.drift import depth_of, kind_of
from ...errors import hearing
from ...record.parts import KEYS, may_have, read_columns, read_whole_rows
from ...record.reader import read_table
from ...record.schema import Part
from ...record.storage import Storage
from ..web.errors import BadParameter, NotThere
from ..web.json_values import numbers, plain
from ..web.query import shortened
from . import metadata
from .execution import ordered
from .layouts import Array, Layout, Tensors
from .notes import notes
from .part_matrices import Index, Parts, answering

#: sampled steps in one answer
MOST_STEPS = 128
#: metrics under other recipes
WHAT_IF_METRICS = ("relative_error", "underflow_pct", "overflow_pct", "mse")
#: rows that are decoded at a time to find one
_METRICS_AT_ONCE, _HISTOGRAMS_AT_ONCE = 1 << 13, 32
#: sets of tensors of which it is kept where they are
_PLACED = 32


def about_run(parts: Parts, run: Storage) -> dict[str, Any]:
    """The sampled steps of a record, the tensors of its newest part, and what is to be said about it."""

    def read(index: Index) -> dict[str, Any]:
        return {
            "version": index.version,
            "steps": index.steps.tolist(),
            "tables": [table for table in metadata.TABLES if index.listed[table]],
            "tensors": placed(ordered(tensors_of_newest(parts, run, index))),
            "notes": notes(parts, run, index),
        }

    return parts.settled(run, read)


@lru_cache(_PLACED)
def placed(tensors: Tensors) -> dict[str, list[Any]]:
    """Layer, role, kind and depth of tensors."""
    layers = [layer for layer, _ in tensors]
    roles = [role for _, role in tensors]
    return {"layer": layers, "role": roles, "kind": list(map(kind_of, layers)), "depth": list(map(depth_of, layers))}


def tensors_of_newest(parts: Parts, run: Storage, index: Index) -> Tensors:
    """The tensors of the newest part whose names can be read."""
    for part in index.newest_first:
        if layout := layout_of(parts, run, part):
            return layout.tensors
    return Tensors()


def layout_of(parts: Parts, run: Storage, part: Part) -> Layout | None:
    """Where the rows of a part are; None where that is damaged."""
    return parts.unless_damaged(run, part, "layout", lambda: parts.layout(run, part))


def metric_of(parts: Parts, run: Storage, part: Part, layout: Layout, name: str) -> Array:
    """float64 [S, T]; NaN where the column is damaged."""
    found = parts.unless_damaged(run, part, name, lambda: parts.metric(run, part, name))
    return np.full((len(layout.steps), len(layout.tensors)), np.nan) if found is None else found


def frames(parts: Parts, run: Storage, metric: str, first: int, last: int) -> bytes:
    """A metric of all tensors at the sampled steps in [first, last]: a header (steps, layer, role, kind, depth), and float32
    [steps, tensors].

    Raises:
        BadParameter: there are more than `MOST_STEPS` of them.
    """

    def read(index: Index) -> bytes:
        steps = index.steps[(index.steps >= first) & (index.steps <= last)].tolist()
        if len(steps) > MOST_STEPS:
            raise BadParameter(
                f"There are {len(steps)} sampled steps from {first} to {last}; ask for {MOST_STEPS} at a time."
            )
        owners = list(dict.fromkeys(index.owner[step] for step in steps))
        layouts = {part: layout for part in owners if (layout := layout_of(parts, run, part))}
        tensors = list(dict.fromkeys(key for held in dict.fromkeys(lay.tensors for lay in layouts.values()) for key in held))
        column = {key: i for i, key in enumerate(tensors)}
        values = np.full((len(steps), len(tensors)), np.nan, "<f4")
        for part, layout in layouts.items():
            mine = [i for i, step in enumerate(steps) if index.owner[step] == part]
            at = np.searchsorted(layout.steps, [steps[i] for i in mine])
            metrics = metric_of(parts, run, part, layout, metric)
            with np.errstate(over="ignore"):
                found = metrics[at].astype("<f4")
            if len(layout.tensors) == len(tensors) and list(layout.tensors) == tensors:
                values[mine] = found
            else:
                values[np.ix_(mine, [column[key] for key in layout.tensors])] = found
        return packed({"steps": steps, **placed(tuple(tensors))}, values)

    return parts.settled(run, read)


def packed(header: dict[str, Any], values: Any) -> bytes:
    """A header as JSON, its length before it (4 bytes, little endian), and an array behind it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + bytes(values.tobytes())


def no_such_tensor(run: Storage, layer: str, role: str) -> NotThere:
    """What is wrong with a question about a tensor that a record does not have."""
    return NotThere(f"The record at {run} has no metrics of {role} of {shortened(layer)}; choose a tensor of its map.")


def nearest(run: Storage, index: Index, step: int) -> int:
    """The sampled step next to one.

    Raises:
        NotThere: nothing was sampled.
    """
    if not len(index.steps):
        raise NotThere(f"The record at {run} has no sampled step yet; wait for the first one.")
    return index.nearest(step)


def histogram_of(parts: Parts, run: Storage, layer: str, role: str, step: int) -> dict[str, Any]:
    """The histograms of a tensor at the sampled step next to one, a row a scale, and all that was recorded of it there.

    Raises:
        NotThere: the record has no such tensor there, or no histogram of it.
    """

    def read(index: Index) -> dict[str, Any]:
        at = nearest(run, index, step)
        part = index.owner[at]
        row = parts.layout(run, part).row(at, (layer, role))
        if row is None:
            raise no_such_tensor(run, layer, f"step {at} of {role}")
        with answering(part):
            recorded = read_whole_rows(run, parts.table, part, [row], _METRICS_AT_ONCE)[0]
        rows = _histograms(run, metadata.TABLES[parts.table], index, part.attempt, at, layer, role)
        if not rows:
            raise NotThere(_why_no_histogram(run, layer, role, at, index))
        return {"step": at, "rows": [_as_told(row) for row in rows], "recorded": plain(recorded)}

    return parts.settled(run, read)


def _histograms(
    run: Storage, table: str, index: Index, attempt: int, step: int, layer: str, role: str
) -> list[dict[str, Any]]:
    for part in index.listed[table]:
        if part.attempt != attempt or not may_have(table, part, step):
            continue
        with answering(part):
            names = pl.DataFrame(pl.from_arrow(read_columns(run, table, part, KEYS)[0])).with_row_index("row")
            named = [pl.col(name).cast(pl.String) == text for name, text in (("layer", layer), ("role", role))]
            if rows := names.filter(pl.col("step") == step, *named)["row"].to_list():
                return read_whole_rows(run, table, part, rows, _HISTOGRAMS_AT_ONCE)
    return []


def _as_told(row: dict[str, Any]) -> dict[str, Any]:
    names = ("recipe", "format", "dtype", "rounded", "scale", "bins", "counts")
    return {name: plain(row[name]) for name in names}


def _why_no_histogram(run: Storage, layer: str, role: str, step: int, index: Index) -> str:
    if not index.listed["histograms"]:
        return f"The record at {run} has no histograms; record the run with histograms to see distributions."
    if "*" in layer.split("."):
        return (
            f"{shortened(layer)} stands for all experts of a layer, which have no histogram of their own; choose an expert."
        )
    return f"The record has no histogram of {role} of {shortened(layer)} at step {step}; choose another step or tensor."


def others(parts: Parts, run: Storage, step: int) -> dict[str, Any]:
    """Metrics of all tensors under recipes, in use and not, at the sampled step next to one."""

    def read(index: Index) -> dict[str, Any]:
        at = nearest(run, index, step)
        names = ["layer", "role", "recipe", *WHAT_IF_METRICS]
        where = {"step": at, "attempt": index.owner[at].attempt}  # of each table, or it would take its own latest
        with hearing():  # what is damaged is told of by `notes`
            tables = {table: read_table(run, table, names, where) for table in ("metrics", "what_if")}
            tables["replayed"] = read_table(run, "replayed", [*names, "rounded"], where)
        rows = pl.concat(
            [rows.with_columns(in_use=pl.lit(table == "metrics")) for table, rows in tables.items()], how="diagonal"
        ).with_columns(pl.col("rounded").fill_null(False))
        rows = rows.unique(["layer", "role", "recipe"], keep="first", maintain_order=True)
        return {"step": at, "rows": in_columns(rows)}

    return parts.settled(run, read)


def in_columns(rows: pl.DataFrame) -> dict[str, Any]:
    """Rows as lists by column."""
    return {
        name: numbers(rows[name].to_numpy()) if name in WHAT_IF_METRICS else rows[name].to_list() for name in rows.columns
    }
