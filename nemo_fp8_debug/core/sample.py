"""A sampled step, and the recorders that receive it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import SHOWN_AS
from .table import Columns


@dataclass(frozen=True)
class Sample:
    """The tables and scalars of one sampled step."""

    step: int
    #: columns by name of the table; the first table is that of operands
    tables: Mapping[str, Columns]
    #: loss, learning rate and gradient norm of the step, as far as they are known
    scalars: Mapping[str, float]
    #: why the step was sampled outside its schedule, or None
    trigger: str | None = None

    @property
    def operand_columns(self) -> Columns:
        """The columns of operands: `KEYS`, how each operand was cast, and metrics. An unavailable metric is None."""
        return next(iter(self.tables.values()), {})

    def get_table(self, name: str) -> Columns:
        """Return the columns of a table. Return an empty mapping if the sample lacks the table."""
        return self.tables.get(name, {})

    def __len__(self) -> int:
        return len(self.operand_columns.get("layer", ()))

    def describe_first_nonfinite(self) -> str | None:
        """Describe the first operand with NaN or infinity, in order of execution. Return None if all are finite."""
        orders = self.operand_columns.get("nonfinite_order", ())
        first = min((i for i, order in enumerate(orders) if order is not None), key=lambda i: orders[i], default=None)
        if first is None:
            return None
        layer, role, nan, inf = (self.operand_columns[name][first] for name in ("layer", "role", "nan", "inf"))
        return f"first with NaN or infinity is {SHOWN_AS[role]} of {layer} ({nan} NaN, {inf} infinite)"

    @property
    def describe_anomalies(self) -> str:
        """Describe what is unusual about the step, or return ""."""
        skipped = "the optimizer skipped this step" if self.scalars.get("skipped") else None
        why = self.trigger and f"sampled because of: {self.trigger}"
        return "; ".join(filter(None, (why, skipped, self.describe_first_nonfinite())))


class Recorder:
    """Stores samples. If a recorder fails, its sample is lost, but the run goes on. The base class stores nothing."""

    #: whether the training thread must call this recorder; other recorders work in the background
    in_callers_thread = False

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Prepare for a run that is about to start.

        Raises:
            ConfigError: the destination cannot be written.
        """

    def record(self, sample: Sample) -> None:
        """Keep one sampled step."""

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the scalars of all steps since the last call, by step."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Keep the losses of an evaluation, by name."""

    def close(self) -> None:
        """Finish after the run."""
