"""What lies between GEMMs."""

from __future__ import annotations

from ...core.observation import SampledTables
from ...core.table import Columns
from ...monitor.run_setup import RunSetup
from ..operands.tensors import TensorObservation, join_rows
from .metrics import activation_columns
from .table import TABLES


def observe(setup: RunSetup) -> ActivationObservation | None:
    """Return what observes activations; None if they are not asked for."""
    return ActivationObservation(setup) if setup.config.activations else None


class ActivationObservation(TensorObservation):
    """Activations."""

    name = "activations"
    roles = TABLES[0].roles

    def __init__(self, setup: RunSetup) -> None:
        super().__init__(setup.shard_group.activations, setup.ranks)

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        found = self.measure(sampled)
        if not found.metrics["layer"]:
            return {}
        keys = list(zip(found.metrics["layer"], found.metrics["role"], strict=True))
        own = activation_columns(sampled.whole[self.name], keys)
        activations, histograms = (table.name for table in TABLES)
        return {activations: join_rows(found.metrics, found.what_if, own), histograms: found.histograms}
