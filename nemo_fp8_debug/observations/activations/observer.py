"""What lies between GEMMs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ...capture.backends.base import not_quantized
from ...capture.operands import Operand, UncastOperand
from ...capture.scan import ScannedModule, scan_modules
from ...capture.tensors import is_counted, is_never_counted
from ...capture.tracing import compiled_by_now
from ...core.error_guard import ErrorGuard
from ...core.keys import ACTIVATIONS, Key
from ...core.layer_names import compile_patterns
from ...core.observation import SampledTables
from ...core.table import Columns
from ...coverage.modules import find_scores
from ...monitor.model_scan import FoundModules
from ...monitor.open_step import OpenStep, RunSetup, StepObserver
from ...options.config import Config
from ..operands.tensors import TensorObservation, join_rows, put_in_use_first
from .capture import ActivationCapture
from .metrics import activation_columns
from .sites import Site, sites_in
from .table import TABLES

NAME = "activations"


def find_modules(scanned: Sequence[ScannedModule], config: Config, errors: ErrorGuard) -> FoundModules:
    """Return the modules whose activations are looked at, as `Site`; say what is left out."""
    if not config.activations:
        return FoundModules()
    sites, compiled = sites_in(scanned, config.activations, find_scores(scanned))
    if compiled:
        errors.warn(
            f"the activations of {len(compiled)} modules (first {compiled[0]}) are not looked at: they run inside "
            "torch.compile, where a hook would change the graph"
        )
    roles = {role for site in sites for role in site.roles}
    for kind in config.activations:
        if not compiled and not roles & {*ACTIVATIONS[kind]}:
            errors.warn(f"activations asks for {kind!r}, and the model has no module that is known as such here")
    return FoundModules(sites, {(site.gemm.name, role): site.gemm.kind for site in sites for role in site.roles})


def observe(setup: RunSetup) -> ActivationObservation | None:
    """Return what observes activations; None if they are not asked for."""
    return ActivationObservation(setup) if setup.config.activations else None


class ActivationStep(StepObserver):
    """Activations in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        found: Sequence[Site] = step.watched.model.features[NAME].modules
        chosen, compiled = compile_patterns(step.config.layers), _compiled(found)
        self._sites = [s for s in found if chosen(s.gemm.name) and id(s.gemm.module) not in compiled]
        counts, what_if = partial(is_counted, rank=step.watched.rank, first=None), step.config.what_if_recipes
        self._operands: dict[Key, Operand] = {
            (site.gemm.name, role): UncastOperand(
                site.gemm, role, not_quantized(role), what_if, is_never_counted if site.is_copied else counts
            )
            for site in self._sites
            for role in site.roles
        }
        step.operands |= self._operands

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        if self._operands:
            ActivationCapture(self._sites, self._operands, step.lose, step.dispatcher).subscribe()


def _compiled(found: Sequence[Site]) -> Collection[int]:
    return compiled_by_now(scan_modules(site.gemm.module for site in found))


class ActivationObservation(TensorObservation):
    """Activations."""

    name = NAME
    roles = TABLES[0].roles

    def __init__(self, setup: RunSetup) -> None:
        kinds = setup.shard_group.tensors
        super().__init__({key: kind for key, kind in kinds.items() if key[1] in self.roles}, setup.ranks)

    def observe(self, step: OpenStep) -> ActivationStep:
        """See `Observation`."""
        return ActivationStep(step)

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        found = self.measure(sampled)
        if not found.metrics["layer"]:
            return {}
        keys = list(zip(found.metrics["layer"], found.metrics["role"], strict=True))
        own = activation_columns(sampled.whole[self.name], keys)
        activations, histograms = (table.name for table in TABLES)
        return {activations: join_rows(found.metrics, found.what_if, own), histograms: found.histograms}

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """Return the rows of all stages of a pipeline in one order."""
        name = TABLES[0].name
        return {name: put_in_use_first(tables[name])} if tables.get(name) else {}
