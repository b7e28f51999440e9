"""Operands of GEMMs and of FP8 attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...core.keys import ATTENTION, ROLES, Key, roles_of
from ...core.observation import Arrays, Plan, SampledTables
from ...core.table import Columns
from ...monitor.run_setup import RunSetup
from ...numerics.metric_columns import unscaled
from .measure import measure
from .table import METRICS_TABLE
from .tensors import Stats, TensorObservation

#: tables whose gradients are also given in the units of the loss
_UNSCALED = ("metrics", "what_if", "copies")


def observe(setup: RunSetup) -> OperandObservation:
    """Return what observes operands."""
    return OperandObservation(setup)


class OperandObservation(TensorObservation):
    """Operands. Scales that are emulated follow their largest magnitudes, on all ranks."""

    name = "operands"
    roles = METRICS_TABLE.roles

    def __init__(self, setup: RunSetup) -> None:
        kinds = setup.shard_group.kinds
        every = [(name, role) for name, kind in kinds.items() for role in roles_of(kind)]
        super().__init__({key: kinds[key[0]].removeprefix(ATTENTION) for key in every}, setup.ranks)
        self._scales = setup.scales

    def _observe(self, amax: Mapping[Key, float]) -> None:
        self._scales.observe({key: value for key, value in amax.items() if key[1] in ROLES})

    def alone(self, found: Stats) -> Stats:
        """See `Observation`."""
        self._observe({stat.key: stat.amax for stat in found})
        return found

    def sums(self, plan: Plan, packed: Arrays, extremes: torch.Tensor) -> torch.Tensor:
        """See `Observation`."""
        self._observe(self._sums.amax(extremes))
        return super().sums(plan, packed, extremes)

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        found = self.measure(sampled)
        keys = zip(found.metrics["layer"], found.metrics["role"], strict=True)
        sampled.norms.update(zip(keys, found.norms, strict=True))
        sampled.casts.update({stat.key: stat.cast for stat in sampled.whole[self.name]})
        return {
            "metrics": found.metrics,
            "what_if": found.what_if,
            "histograms": found.histograms,
            "copies": found.copies,
            "block_scales": found.block_scales,
        }

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """See `Observation`."""
        # A step in which no rank saw any operand has a table all the same.
        known = tables if "metrics" in tables else {"metrics": measure([]).metrics, **tables}
        multiplier = scalars.get("grad_scale")
        return {name: {**columns, **unscaled(columns, multiplier)} for name in _UNSCALED if (columns := known.get(name))}
