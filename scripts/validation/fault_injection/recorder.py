"""Takes a run's samples in memory, and gives them as the tables of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nemo_fp8_debug.core.sample import Recorder, Sample
from nemo_fp8_debug.record.schema import SCHEMAS


class InMemory(Recorder):
    """A recorder without files."""

    def __init__(self) -> None:
        self.fingerprint: dict[str, Any] = {}
        self._samples: list[pl.DataFrame] = []
        self._steps: list[dict[str, Any]] = []

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = dict(fingerprint)

    def record(self, sample: Sample) -> None:
        rows = len(sample)
        keys = {"attempt": [0] * rows, "step": [sample.step] * rows}
        keys["consumed_samples"] = [sample.scalars.get("consumed_samples")] * rows
        self._samples.append(_frame("metrics", {**keys, **sample.operand_columns}))

    def record_steps(self, steps: Mapping[int, Mapping[str, Any]]) -> None:
        self._steps += [{"attempt": 0, "step": step, **scalars} for step, scalars in steps.items()]

    @property
    def metrics(self) -> pl.DataFrame:
        """As in a record."""
        return pl.concat(self._samples).sort("step", maintain_order=True)

    @property
    def steps(self) -> pl.DataFrame:
        """As in a record."""
        return _frame("steps", {name: [row.get(name) for row in self._steps] for name in SCHEMAS["steps"]}).sort("step")


def _frame(table: str, columns: Mapping[str, Any]) -> pl.DataFrame:
    rows = len(next(iter(columns.values())))
    schema = SCHEMAS[table]
    return pl.DataFrame({n: columns.get(n, [None] * rows) for n in schema}, schema=schema, strict=False)
