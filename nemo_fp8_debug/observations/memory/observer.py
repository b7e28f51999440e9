"""Memory of each process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...capture.packed_transfer import Move
from ...core.keys import Key
from ...core.observation import Arrays, Plan, SampledTables
from ...core.table import Columns
from ...monitor.open_step import OpenStep
from ...monitor.pipeline import Sampled
from ...monitor.run_setup import RunSetup
from .table import METRICS, TABLES


def observe(setup: RunSetup) -> MemoryObservation:
    """Return what observes memory."""
    return MemoryObservation(setup.ranks.rank, setup.shard_group.ranks)


class MemoryStep:
    """Memory in one sampled step."""

    def __init__(self) -> None:
        #: as `METRICS`; None: no optimizer has stepped
        self.found: tuple[float, ...] | None = None

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        step.dispatcher.watch_optimizer(partial(step.guard, "while reading memory"), after=self._read)

    def _read(self, optimizer: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        self.found = float(pages * os.sysconf("SC_PAGE_SIZE")), float(device)

    def close(self) -> Collection[Key]:
        """See `StepObserver`."""
        return ()

    def move(self, to: Move) -> None:
        """Hold no tensor."""


class MemoryObservation:
    """Memory of all ranks, each of which adds its own row."""

    name = "memory"

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank, self._ranks = rank, list(ranks)

    def observe(self, step: OpenStep) -> MemoryStep:
        """See `Observation`."""
        return MemoryStep()

    def collect(self, step: Sampled) -> tuple[float, ...] | None:
        """See `Observation`."""
        mine: MemoryStep | None = step.observers.get(self.name)
        return mine.found if mine else None

    def pack(self, plan: Plan, found: tuple[float, ...] | None, expected: Collection[Key]) -> Arrays:
        """See `Observation`."""
        rows = np.zeros((len(self._ranks), len(METRICS)))
        if found is not None:
            rows[self._ranks.index(self._rank)] = found
        return {"rows": rows}

    def extremes(self, packed: Arrays) -> torch.Tensor:
        """See `Observation`."""
        return torch.zeros(0, dtype=torch.int32)

    def sums(self, plan: Plan, packed: Arrays, extremes: torch.Tensor) -> torch.Tensor:
        """See `Observation`."""
        return torch.tensor(packed["rows"]).flatten()

    def whole(self, plan: Plan, sums: torch.Tensor, extremes: torch.Tensor) -> list[tuple[int, list[float]]]:
        """See `Observation`."""
        rows = zip(self._ranks, sums.view(len(self._ranks), -1).tolist(), strict=True)
        return [(rank, row) for rank, row in rows if any(row)]

    def alone(self, found: tuple[float, ...] | None) -> list[tuple[int, list[float]]]:
        """See `Observation`."""
        return [] if found is None else [(self._rank, list(found))]

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        found = sampled.whole[self.name]
        values = {name: [row[i] for _, row in found] for i, name in enumerate(METRICS)}
        return {TABLES[0].name: {"rank": [rank for rank, _ in found], **values} if found else {}}

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """See `Observation`."""
        return {}
