"""Which histograms of a record are kept when somebody asks for fewer: by age, and of experts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from ..core.keys import Key
from ..core.layer_names import aggregate_of
from ..errors import ConfigError
from .expert_histograms import HARM, one_and_worst, worst_experts
from .reader import read_table
from .schema import TABLES, arrow_table

#: tables of histograms, and the table that has the metrics of the same tensors
OF_HISTOGRAMS = {table.histograms: table.name for table in TABLES.values() if table.histograms}


@dataclass(frozen=True)
class Thinning:
    """What is asked for; by default nothing is.

    Args:
        every: of the old steps one of so many steps keeps its histograms; None: no old step does, or all of them if
            `older_than` is not given either.
        older_than: steps before the newest sample from which on a step is old; None: all are but the newest.
        experts: whether experts of a layer are kept as one histogram, and the worst expert's.
        keep: steps that keep their histograms, whatever their age.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> sorted(Thinning(every=100, older_than=50, keep=[30]).kept(range(0, 301, 10)))
        [0, 30, 100, 200, 250, 260, 270, 280, 290, 300]
    """

    every: int | None = None
    older_than: int | None = None
    experts: bool = False
    keep: Collection[int] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 1), ("older_than", self.older_than, 0)):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be a whole number, at least {least}")

    @property
    def by_age(self) -> bool:
        """Whether steps are dropped."""
        return self.every is not None or self.older_than is not None

    def touches(self, table: str) -> bool:
        """Whether rows of a table may go."""
        return table in OF_HISTOGRAMS and (self.by_age or self.experts)

    def kept(self, steps: Collection[int]) -> set[int]:
        """The steps of an attempt that keep their histograms.

        Args:
            steps: those that have some.
        """
        if not self.by_age or not steps:
            return set(steps)
        newest = max(steps)
        young = {step for step in steps if step == newest or step >= newest - (self.older_than or 0)}
        named = set(steps) & set(self.keep)
        if self.every is None:
            return young | named
        first_of_each = {step // self.every: step for step in sorted(steps, reverse=True)}
        return young | named | set(first_of_each.values())


def named_steps(run: str | os.PathLike[str]) -> set[int]:
    """Steps of a record that a verdict may name by itself: what triggers sampled, and samples with NaN or infinity."""
    triggered = read_table(run, "steps", ["step", "trigger"]).filter(pl.col("trigger").is_not_null())
    counted = read_table(run, "metrics", ["step", "nan", "inf"])
    nonfinite = counted.filter((pl.col("nan") > 0) | (pl.col("inf") > 0))
    return {*triggered["step"], *nonfinite["step"]}


class FewerExperts:
    """Histograms of experts as one and the worst, step by step."""

    def __init__(self, run: str | os.PathLike[str], table: str, attempt: int) -> None:
        """
        Args:
            table: of histograms.
            attempt: whose metrics tell the worst.
        """
        self._table = table
        names = ["attempt", "step", "layer", "role", "n", *HARM]
        rows = read_table(run, OF_HISTOGRAMS[table], [*names, "scale_source"])
        rows = rows.filter(pl.col("scale_source").ne_missing("what-if") & (pl.col("attempt") == attempt))
        self._worst = {
            int(step[0]): worst_experts(of_step.to_dict(as_series=False)) for step, of_step in rows.group_by("step")
        }

    def of_step(self, rows: pa.Table) -> pa.Table:
        """The rows of one step."""
        worst: Mapping[Key, str] = self._worst.get(rows["step"][0].as_py(), {})
        if not worst or not any(map(aggregate_of, rows["layer"].to_pylist())):
            return rows
        columns: dict[str, Any] = {name: rows[name].to_pylist() for name in rows.column_names if name not in _LISTS}
        columns |= {name: _arrays(rows[name]) for name in _LISTS}
        return arrow_table(self._table, one_and_worst(columns, worst))


_LISTS = ("bins", "counts")


def _arrays(column: pa.ChunkedArray) -> list[Any]:
    return [row.values.to_numpy() for row in column]
