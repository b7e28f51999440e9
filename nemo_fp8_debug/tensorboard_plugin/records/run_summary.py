"""Summarize a run: its steps, tensors and notes, its losses, and its metrics under other recipes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from ...analysis.loss.curve import LossCurve
from ...core.scale_sources import classify_run_quantization, describe_quantization
from ...errors import capture_warnings
from ...record.reader import read_fingerprint, read_step_scalars, read_table_rows
from ...record.storage import FolderStorage
from ..web import replace_nonfinite_by_null
from . import metadata
from .heatmap import list_newest_tensors, make_tensor_columns
from .metadata import sort_tensors_by_execution
from .part_matrices import CachedPartReader, SampledStepIndex
from .tensor_history import find_nearest_step
from .thinning import thin_series

#: metrics under other recipes
WHAT_IF_METRICS = ("relative_error", "underflow_pct", "overflow_pct", "mse")


def describe_run(parts: CachedPartReader, run: FolderStorage) -> dict[str, Any]:
    """Return the sampled steps of a record, the tensors of its newest part, and notes about the record."""

    def read(index: SampledStepIndex) -> dict[str, Any]:
        return {
            "version": index.version,
            "steps": index.steps.tolist(),
            "tables": [table for table in metadata.TABLES if index.listed[table]],
            "tensors": make_tensor_columns(sort_tensors_by_execution(list_newest_tensors(parts, run, index))),
            "notes": list_notes(parts, run, index),
        }

    return parts.read_with_retry(run, read)


def read_other_recipes(parts: CachedPartReader, run: FolderStorage, step: int) -> dict[str, Any]:
    """Return the metrics of all tensors at the nearest sampled step, under the recipes in use and under other recipes."""

    def read(index: SampledStepIndex) -> dict[str, Any]:
        at = find_nearest_step(run, index, step)
        names = ["layer", "role", "recipe", *WHAT_IF_METRICS]
        where = {"step": at, "attempt": index.owner[at].attempt}  # else each table would use its own latest attempt
        with capture_warnings():  # the notes of the run report damage
            tables = {table: read_table_rows(run, table, names, where) for table in ("metrics", "what_if")}
            tables["replayed"] = read_table_rows(run, "replayed", [*names, "rounded"], where)
        rows = pl.concat(
            [rows.with_columns(in_use=pl.lit(table == "metrics")) for table, rows in tables.items()], how="diagonal"
        ).with_columns(pl.col("rounded").fill_null(False))
        rows = rows.unique(["layer", "role", "recipe"], keep="first", maintain_order=True)
        return {"step": at, "rows": convert_rows_to_columns(rows)}

    return parts.read_with_retry(run, read)


def convert_rows_to_columns(rows: pl.DataFrame) -> dict[str, Any]:
    """Return rows as lists by column."""
    return {
        name: replace_nonfinite_by_null(rows[name].to_numpy()) if name in WHAT_IF_METRICS else rows[name].to_list()
        for name in rows.columns
    }


def list_notes(parts: CachedPartReader, run: FolderStorage, index: SampledStepIndex) -> list[str]:
    """Return sentences about damage and other problems of a record."""
    with capture_warnings() as heard:
        fingerprint = read_fingerprint(run)
    told = [f"{message}." for message in (*heard, *index.heard)]
    if damaged := parts.list_damaged_parts(run) | index.damaged:
        (name, why), *others = damaged.items()
        more = f" {len(others)} other parts are left out too." if others else ""
        told.append(f"The metrics of {name} are left out: {why}{more}")
    if not len(index.steps) and not index.damaged:
        told.append("The record has no metrics yet, because no step was sampled.")
    attempts = {part.attempt for part in index.owner.values()}
    if len(attempts) > 1:
        told.append(f"The run was started {len(attempts)} times. If a step was repeated, only its latest values are shown.")
    known = find_quantization(parts, run, index, fingerprint)
    if known is not None and (said := describe_quantization(known)):
        told.append(said)
    return told


def find_quantization(
    parts: CachedPartReader, run: FolderStorage, index: SampledStepIndex, fingerprint: Mapping[str, Any]
) -> str | None:
    """Return `classify_run_quantization` of the newest readable part, or None if no part is readable."""
    for part in index.newest_parts_first:
        if sources := parts.read_unless_damaged(
            run, part, "scale_source", partial(parts.read_text_column, run, part, "scale_source")
        ):
            return classify_run_quantization(
                {sources.known[code] for code in np.unique(sources.codes)} - {None}, fingerprint
            )
    return None


SERIES = ("loss", "grad_norm", "lr")
#: largest number of points, and largest number of marks of each kind
_POINTS, _MARKS = 4000, 1000
#: a spike is more than this many standard deviations above the running median
_SIGMAS = 5.0
#: a spike is also above the minimum of this many previous losses
_BEFORE = 3


def read_step_series(run: FolderStorage) -> dict[str, Any]:
    """Return loss, gradient norm and learning rate by step, thinned out, with triggers, skipped steps and spikes.

    A value is null if it was not recorded, or if it is NaN or infinite. `not_finite` has the steps of NaN and infinity, by
    name.
    """
    with capture_warnings():
        table = read_step_scalars(run, ["step", *SERIES, "skipped", "trigger"]).unique("step", keep="last").sort("step")
    values = {name: table[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in SERIES}
    recorded = {name: table[name].is_not_null().to_numpy() for name in SERIES}
    kept = thin_series(list(values.values()), _POINTS, list(recorded.values()))
    steps = table["step"].to_numpy()[kept]
    triggers = table.filter(pl.col("trigger").is_not_null()).select("step", "trigger")
    skipped = table.filter(pl.col("skipped").fill_null(0) != 0)["step"]
    return {
        "step": steps.tolist(),
        **{name: replace_nonfinite_by_null(column[kept]) for name, column in values.items()},
        "not_finite": {
            name: steps[recorded[name][kept] & ~np.isfinite(column[kept])].tolist() for name, column in values.items()
        },
        "triggers": [list(row) for row in triggers.tail(_MARKS).rows()],
        "skipped": skipped.tail(_MARKS).to_list(),
        "spikes": _spikes(table),
    }


def _spikes(table: pl.DataFrame) -> list[int]:
    """Return the steps at which the loss jumps up or is not finite. If there are many, return those with the highest
    losses.
    """
    curve = LossCurve.from_steps_table(table)
    if not len(curve.steps):
        return []
    before = pl.Series(curve.losses).fill_nan(None).shift(1).rolling_min(_BEFORE, min_samples=1).to_numpy().copy()
    before[0] = np.inf
    with np.errstate(invalid="ignore"):
        # While a loss falls fast, as at the start, all values are above the running median. So compare with earlier values
        # too.
        above = np.nan_to_num(curve.losses - np.fmax(curve.smooth, before), nan=0.0, posinf=np.inf)
    high = np.flatnonzero(above > _SIGMAS * curve.scatter_around_median)
    highest = high[np.argsort(-above[high], kind="stable")[:_MARKS]]
    return sorted(curve.steps[highest].tolist())
