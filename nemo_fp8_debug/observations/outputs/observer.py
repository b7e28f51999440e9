"""Errors of what GEMMs put out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from ...core.keys import Key
from ...core.observation import Arrays, Plan, SampledTables
from ...core.table import Columns
from ...monitor.pipeline import Sampled
from ...monitor.run_setup import RunSetup
from ...numerics.gemm_error import PRODUCTS, SUMS
from .rows import OutputSums, output_columns
from .table import TABLES


def observe(setup: RunSetup) -> OutputObservation | None:
    """Return what observes errors of outputs; None if they are not asked for."""
    return OutputObservation(setup.gemms) if setup.config.output_rows else None


class OutputObservation:
    """Sums over parts of outputs, which ranks add up as they are."""

    name = "outputs"

    def __init__(self, gemms: Collection[str]) -> None:
        self._keys = [(name, product) for name in gemms for product in PRODUCTS]

    def collect(self, step: Sampled) -> OutputSums:
        """See `Observation`."""
        return {key: sums for products in step.products for key, sums in products.sums().items()}

    def pack(self, plan: Plan, found: OutputSums | None, expected: Collection[Key]) -> Arrays:
        """See `Observation`."""
        rows = np.zeros((len(self._keys), len(SUMS) + 1))
        for row, key in zip(rows, self._keys, strict=True):
            if (mine := (found or {}).get(key)) is not None:
                row[:] = mine.numpy()
        return {"sums": rows}

    def extremes(self, packed: Arrays) -> torch.Tensor:
        """See `Observation`."""
        return torch.zeros(0, dtype=torch.int32)

    def sums(self, plan: Plan, packed: Arrays, extremes: torch.Tensor) -> torch.Tensor:
        """See `Observation`."""
        return torch.tensor(packed["sums"]).flatten()

    def whole(self, plan: Plan, sums: torch.Tensor, extremes: torch.Tensor) -> OutputSums:
        """See `Observation`."""
        rows = zip(self._keys, sums.view(-1, len(SUMS) + 1), strict=True)
        return {key: row for key, row in rows if row[-1] > 0}

    def alone(self, found: OutputSums) -> OutputSums:
        """See `Observation`."""
        return found

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        return {TABLES[0].name: output_columns(sampled.whole[self.name], sampled.kinds, sampled.casts)}

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """See `Observation`."""
        return {}
