"""The record of a run, in the form that analyses use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from ...core.keys import Key
from ...core.scale_sources import classify_run_quantization
from ...errors import ConfigError, RecordError
from ...record.reader import find_record, read_fingerprint, read_step_scalars, read_table_rows
from ..loss.curve import LossCurve
from .metrics import HELD, MetricsTable

#: quantities by which runs can be matched, with the name of one unit
UNITS = {"step": "step", "samples": "sample"}


@dataclass(frozen=True)
class Run:
    """The record of a run. If runs are matched by consumed samples, all of its steps are numbers of consumed samples."""

    path: str
    fingerprint: dict[str, Any]
    #: the `metrics` table
    metrics: MetricsTable
    #: losses by step
    loss: LossCurve
    #: unit of the steps: step or sample
    unit: str = "step"
    #: number of consumed samples at each step; None if runs are matched by steps
    axis: pl.DataFrame | None = None
    #: new names of layers, by their names in the record
    renamed_to: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str], by: str = "step", held: int = HELD) -> Run:
        """Read a record.

        Args:
            by: `step`, or `samples` to count consumed samples instead of steps.
            held: largest number of metric rows to keep in memory. Columns of a longer table are read when needed.

        Raises:
            RecordError: there is no record at `path`, it is unreadable, or it lacks the numbers of consumed samples.
            ConfigError: `by` is invalid.
        """
        if by not in UNITS:
            raise ConfigError(f"runs cannot be matched by {by!r}; choose from {', '.join(UNITS)}")
        found = find_record(path)
        fingerprint = read_fingerprint(found)  # read this first, because it refuses a record of another schema
        steps = read_step_scalars(found, ["step", "loss", "consumed_samples"])
        metrics = MetricsTable.read(found, held)
        axis = _samples_consumed(str(found), steps, metrics) if by == "samples" else None
        losses = LossCurve.from_steps_table(_along(axis, steps))
        return cls(
            str(found), fingerprint, metrics if axis is None else metrics.renumber_steps(axis), losses, UNITS[by], axis
        )

    @cached_property
    def quantization(self) -> str:
        """Return a constant of `core.scale_sources` that says whether the run quantizes."""
        return classify_run_quantization(self.metrics.list_distinct_values("scale_source"), self.fingerprint)

    @cached_property
    def planned(self) -> set[Key]:
        """Return layer and role of the operands whose recipe a plan chose."""
        recipe = self.fingerprint.get("recipe")
        planned = recipe.get("planned") if isinstance(recipe, dict) else None
        by_layer = planned.items() if isinstance(planned, dict) else ()
        return {(layer, str(role)) for layer, roles in by_layer if isinstance(roles, list) for role in roles}

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Return the `steps` table. It is read when it is first used."""
        return _along(self.axis, read_step_scalars(self.path))

    @cached_property
    def loss_scale_skips(self) -> pl.Series:
        """Return the skipped steps before the last successful optimizer step, in runs with a dynamic loss scale.

        These steps do no harm: gradients overflowed while the loss scale adapted, and training went on.
        """
        steps = self.steps.with_columns(skipped=pl.col("skipped").fill_null(0) != 0)
        if steps["loss_scale"].drop_nulls().n_unique() < 2:
            return steps["step"].clear()
        last = pl.col("step").filter(~pl.col("skipped")).max()
        return steps.filter(pl.col("skipped") & (pl.col("step") < last) & pl.col("loss_scale").is_not_null())["step"]

    def drop_skipped_steps(self) -> Run:
        """Return the run without the samples of skipped steps; see `loss_scale_skips`."""
        return replace(self, metrics=self.metrics.drop_steps(self.loss_scale_skips.to_list()))

    @cached_property
    def _tables(self) -> dict[str, pl.DataFrame]:
        return {}

    def read_table(self, name: str) -> pl.DataFrame:
        """Return a table of the record. It is read when it is first used. If the run does not have the table, it is
        empty.
        """
        if name not in self._tables:
            self._tables[name] = _with_names(_along(self.axis, read_table_rows(self.path, name)), self.renamed_to)
        return self._tables[name]

    @cached_property
    def validation(self) -> dict[str, LossCurve]:
        """Return the losses of evaluations by name. They are read when they are first used."""
        rows = _along(self.axis, read_table_rows(self.path, "validation", ["step", "name", "loss"]))
        return {
            name: LossCurve.from_steps_table(rows.filter(name=name)) for name in rows["name"].unique(maintain_order=True)
        }

    @cached_property
    def unused_recipe_metrics(self) -> pl.DataFrame:
        """Return metrics under recipes that were not in use, from what-if recipes or replay. They are read when they are
        first used.
        """
        rows = pl.concat([read_table_rows(self.path, table) for table in ("what_if", "replayed")], how="diagonal")
        return _with_names(_along(self.axis, rows), self.renamed_to)

    def rename_layers(self, names: Mapping[str, str]) -> Run:
        """Return the run with other layer names."""
        return replace(self, metrics=self.metrics.rename_layers(names), renamed_to=names)

    def restore_recorded_names(self) -> Run:
        """Return the run with the layer names of the record."""
        return (
            replace(self, metrics=self.metrics.rename_layers(self.recorded_names), renamed_to={})
            if self.renamed_to
            else self
        )

    @property
    def recorded_names(self) -> dict[str, str]:
        """Return the recorded names of renamed layers, by their new names."""
        return {there: own for own, there in self.renamed_to.items()}


def _with_names(rows: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    return rows.with_columns(pl.col("layer").replace(dict(names))) if names else rows


def _along(axis: pl.DataFrame | None, rows: pl.DataFrame) -> pl.DataFrame:
    """If there is an axis, replace `step` by the number of consumed samples."""
    if axis is None:
        return rows
    return rows.join(axis, on="step").with_columns(step="sample").drop("sample").sort("step", maintain_order=True)


def _samples_consumed(path: str, steps: pl.DataFrame, metrics: MetricsTable) -> pl.DataFrame:
    """Return step and sample (number of consumed samples). Interpolate between steps at which the framework reported the
    number.
    """
    columns = ["step", "consumed_samples"]
    of_steps = [
        rows.select(columns).unique("step", keep="first") for rows in metrics.read_rows_in_batches(["consumed_samples"])
    ]
    both = pl.concat([steps.select(columns), *of_steps])
    known = both.drop_nulls().unique("step", keep="first").sort("step")
    if known.is_empty():
        raise RecordError(f"{path} does not record consumed samples; match the runs by step")
    within = both["step"].unique().sort()
    within = within.filter(within.is_between(known["step"][0], known["step"][-1]))
    samples = np.interp(within.to_numpy(), known["step"].to_numpy(), known["consumed_samples"].to_numpy())
    return pl.DataFrame({"step": within, "sample": np.rint(samples).astype(np.int64)})
