"""A record as the analysis reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from ...core.scale_sources import classify_sources
from ...errors import ConfigError, RecordError
from ...record.reader import find_run, read_fingerprint, read_table
from ..loss.curve import LossCurve
from .metrics import HELD, Metrics

#: what runs can be matched by, and how one of it is called
UNITS = {"step": "step", "samples": "sample"}


@dataclass(frozen=True)
class Run:
    """A record, read."""

    path: str
    fingerprint: dict[str, Any]
    #: `metrics` table; where runs are matched by samples, `step` counts those
    metrics: Metrics
    #: likewise
    loss: LossCurve
    #: what `step` counts: step or sample
    unit: str = "step"
    #: samples consumed at each step; None where steps are counted
    axis: pl.DataFrame | None = None
    #: names in the record that others stand for here
    renamed_to: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str], by: str = "step", held: int = HELD) -> Run:
        """
        Args:
            by: `step`, or `samples`: consumed samples take the place of steps.
            held: rows of metrics that are read at once; of a longer table columns are read as they are needed.

        Raises:
            RecordError: there is no record at `path`, it cannot be read, or it does not know the samples consumed.
            ConfigError: `by` is neither.
        """
        if by not in UNITS:
            raise ConfigError(f"runs cannot be matched by {by!r}; choose from {', '.join(UNITS)}")
        found = find_run(path)
        fingerprint = read_fingerprint(found)  # first: it refuses a record of another schema
        steps = read_table(found, "steps", ["step", "loss", "consumed_samples"])
        metrics = Metrics.read(found, held)
        axis = _samples_consumed(str(found), steps, metrics) if by == "samples" else None
        losses = LossCurve.of(_along(axis, steps))
        return cls(str(found), fingerprint, metrics if axis is None else metrics.along(axis), losses, UNITS[by], axis)

    @cached_property
    def quantization(self) -> str:
        """Whether the run quantizes, as `core.scale_sources` tells it."""
        return classify_sources(self.metrics.unique("scale_source"), self.fingerprint)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """`steps` table; read when first asked for."""
        return _along(self.axis, read_table(self.path, "steps"))

    @cached_property
    def made_up_for(self) -> pl.Series:
        """Steps that the optimizer skipped while it took a later one, where the loss scale moves: gradients that overflow
        while one is sought have changed nothing."""
        steps = self.steps.with_columns(skipped=pl.col("skipped").fill_null(0) != 0)
        if steps["loss_scale"].drop_nulls().n_unique() < 2:
            return steps["step"].clear()
        last = pl.col("step").filter(~pl.col("skipped")).max()
        return steps.filter(pl.col("skipped") & (pl.col("step") < last) & pl.col("loss_scale").is_not_null())["step"]

    def without_skipped(self) -> Run:
        """The same without the samples of such steps."""
        return replace(self, metrics=self.metrics.without_steps(self.made_up_for.to_list()))

    @cached_property
    def _tables(self) -> dict[str, pl.DataFrame]:
        return {}

    def table(self, name: str) -> pl.DataFrame:
        """Return a table of the record, empty if the run has none; it is read when first asked for."""
        if name not in self._tables:
            self._tables[name] = _with_names(_along(self.axis, read_table(self.path, name)), self.renamed_to)
        return self._tables[name]

    @cached_property
    def validation(self) -> dict[str, LossCurve]:
        """Losses of evaluations by name; read when first asked for."""
        rows = _along(self.axis, read_table(self.path, "validation", ["step", "name", "loss"]))
        return {name: LossCurve.of(rows.filter(name=name)) for name in rows["name"].unique(maintain_order=True)}

    @cached_property
    def others(self) -> pl.DataFrame:
        """Metrics under recipes that were not in use, measured in the run or added by replay; read when first asked for."""
        rows = pl.concat([read_table(self.path, table) for table in ("what_if", "replayed")], how="diagonal")
        return _with_names(_along(self.axis, rows), self.renamed_to)

    def renamed(self, names: Mapping[str, str]) -> Run:
        """The same with other names for its layers."""
        return replace(self, metrics=self.metrics.renamed(names), renamed_to=names)

    def as_recorded(self) -> Run:
        """The same with the names that its layers have in the record."""
        return replace(self, metrics=self.metrics.renamed(self.own_names), renamed_to={}) if self.renamed_to else self

    @property
    def own_names(self) -> dict[str, str]:
        """By the name of each layer that has another here, that in the record."""
        return {there: own for own, there in self.renamed_to.items()}


def _with_names(rows: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    return rows.with_columns(pl.col("layer").replace(dict(names))) if names else rows


def _along(axis: pl.DataFrame | None, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows whose `step` is the samples consumed."""
    if axis is None:
        return rows
    return rows.join(axis, on="step").with_columns(step="sample").drop("sample").sort("step", maintain_order=True)


def _samples_consumed(path: str, steps: pl.DataFrame, metrics: Metrics) -> pl.DataFrame:
    """step, sample: as the host reported them, and between such steps in proportion."""
    columns = ["step", "consumed_samples"]
    of_steps = [rows.select(columns).unique("step", keep="first") for rows in metrics.scan(["consumed_samples"])]
    both = pl.concat([steps.select(columns), *of_steps])
    known = both.drop_nulls().unique("step", keep="first").sort("step")
    if known.is_empty():
        raise RecordError(f"{path} does not know how many samples were consumed; match the runs by step")
    within = both["step"].unique().sort()
    within = within.filter(within.is_between(known["step"][0], known["step"][-1]))
    samples = np.interp(within.to_numpy(), known["step"].to_numpy(), known["consumed_samples"].to_numpy())
    return pl.DataFrame({"step": within, "sample": np.rint(samples).astype(np.int64)})
