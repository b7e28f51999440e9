"""Observe weight gradients, optimizer states and steps of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from ...capture.gemms import match_gemms_by_name
from ...capture.optimizer_weights import find_gemm_parameter
from ...core.keys import Key
from ...core.layer_names import is_expert_aggregate
from ...core.observation import CombinedObservations
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver, make_weight_filter
from ..operands.tensors import TensorObservation, append_what_if_rows, sort_in_use_rows_first
from .optimizer import StateCapture, make_state_operands, make_update_columns
from .table import TABLES, UPDATE_METRICS


def make_observation(setup: RunSetup) -> StateObservation | None:
    """Return the observation of states, or None if they are not enabled."""
    return StateObservation(setup) if setup.config.states else None


class StateStep(StepObserver):
    """The observer of optimizers in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        config, watched = step.config, step.watched
        gemms = [gemm for gemm in match_gemms_by_name(step.known, config.layers) if find_gemm_parameter(gemm) is not None]
        counts = partial(make_weight_filter, watched.shard_group, watched.rank)
        operands = make_state_operands(gemms, config.states, config.what_if_recipes, counts)
        step.operands |= operands

        def find_weight_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
            products = step.products.get(name)
            return None if products is None else products.weight_gradient

        self._errors = watched.errors
        self._capture = StateCapture(step.operands, step.guard, config.output_rows, step.number, find_weight_gradient)
        if "weight_gradient" in config.states:
            step.gradients.add_watcher(self._capture.count_gradients)
        self._is_open = False

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        self._capture.subscribe(step.dispatcher)
        self._is_open = True

    def stop_observing(self) -> Collection[Key]:
        """See `StepObserver`."""
        if self._is_open and self._capture.has_no_optimizer_step:
            why = "it skipped the step, or its parameters are flattened (FSDP1), or do not belong to the model"
            self._errors.warn(f"the optimizer's states were not observed: {why}", kind="states")
        return ()


class StateObservation(TensorObservation):
    """The observation of states."""

    name = "states"
    roles = TABLES[0].roles

    def __init__(self, setup: RunSetup) -> None:
        kinds = setup.shard_group.kinds
        keys = [(name, role) for name in setup.gemm_names for role in setup.config.states]
        super().__init__({key: kinds[key[0]] for key in keys}, setup.ranks)

    def start_observer(self, step: OpenStep) -> StateStep:
        """See `FeatureObservation`."""
        return StateStep(step)

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        found = self.measure_tensors(sampled)
        if not found.metrics["layer"]:
            return {}
        updates = make_update_columns(sampled.whole[self.name])
        own: dict[str, list[Any]] = {"norm": found.norms, "share_pct": [None] * len(found.norms), "update_to_weight": []}
        own |= {name: [] for name in UPDATE_METRICS}
        for layer, role, norm in zip(found.metrics["layer"], found.metrics["role"], found.norms, strict=True):
            weight = sampled.norms.get((layer, "weight")) if role == "update" else None
            own["update_to_weight"].append(norm / weight if weight else None)
            errors = updates.get(layer, {}) if role == "update" else {}
            for name in UPDATE_METRICS:
                own[name].append(errors.get(name))
        states, histograms = (table.name for table in TABLES)
        return {states: append_what_if_rows(found.metrics, found.what_if, own), histograms: found.histograms}

    def finish_tables(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """Return states with their shares of the squared norms of all layers, which no single pipeline stage has."""
        name = TABLES[0].name
        if not (states := tables.get(name)):
            return {}
        rows = list(zip(states["layer"], states["role"], states["norm"], strict=True))
        totals = defaultdict[str, float](float)
        for layer, role, norm in rows:
            totals[role] += 0.0 if norm is None or is_expert_aggregate(layer) else norm**2
        shares = [None if n is None or not totals[role] else 100 * n**2 / totals[role] for _, role, n in rows]
        return {name: sort_in_use_rows_first({**states, "share_pct": shares})}
