"""One sampled step as the recorders get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import SHOWN_AS
from .table import Columns


@dataclass(frozen=True)
class Sample:
    """The tables of one step."""

    step: int
    #: columns by table, as the record names it; the first table is that of operands
    tables: Mapping[str, Columns]
    #: of the step as a whole: loss, learning rate, gradient norm, as far as they are known
    scalars: Mapping[str, float]
    #: why the step was sampled, where it was not its turn
    trigger: str | None = None

    @property
    def columns(self) -> Columns:
        """The metrics of operands: KEYS, how each was cast, then its metrics; None where one cannot be had."""
        return next(iter(self.tables.values()), {})

    def table(self, name: str) -> Columns:
        """Return the columns of a table; empty if the sample has none."""
        return self.tables.get(name, {})

    def __len__(self) -> int:
        return len(self.columns.get("layer", ()))

    def describe_first_nonfinite(self) -> str | None:
        """The operand that was the first in the order of execution to hold NaN or infinity, in words."""
        orders = self.columns.get("nonfinite_order", ())
        first = min((i for i, order in enumerate(orders) if order is not None), key=lambda i: orders[i], default=None)
        if first is None:
            return None
        layer, role, nan, inf = (self.columns[name][first] for name in ("layer", "role", "nan", "inf"))
        return f"first with NaN or infinity is {SHOWN_AS[role]} of {layer} ({nan} NaN, {inf} infinite)"

    @property
    def remarks(self) -> str:
        """What is out of the ordinary about the step, in words; empty where nothing is."""
        skipped = "the optimizer skipped this step" if self.scalars.get("skipped") else None
        why = self.trigger and f"sampled because of: {self.trigger}"
        return "; ".join(filter(None, (why, skipped, self.describe_first_nonfinite())))


class Recorder:
    """Takes samples somewhere. A fault in one costs that recorder's sample, not the run. By itself it keeps nothing."""

    #: whether it must be called in the thread of the training loop; others work in the background
    in_callers_thread = False

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """The run is about to start.

        Raises:
            ConfigError: the place cannot be written.
        """

    def record(self, sample: Sample) -> None:
        """Keep one sampled step."""

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the scalars of all steps since the last call, by step."""

    def record_validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Keep the losses of an evaluation, by name."""

    def close(self) -> None:
        """The run is over."""
