"""Observe tensors between GEMMs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...capture.backends.base import make_unquantized_cast
from ...capture.operand_stats import OperandStats
from ...capture.operands import OperandAccumulator, UncastAccumulator
from ...capture.scan import ScannedModule, scan_modules
from ...capture.tensors import is_counted_here, never_count_here
from ...capture.tracing import find_compiled_modules
from ...core.error_guard import ErrorGuard
from ...core.keys import ACTIVATIONS, Key
from ...core.layer_names import compile_layer_patterns
from ...core.observation import CombinedObservations
from ...core.table import Columns
from ...coverage.modules import find_attention_score_modules
from ...monitor.model_scan import FeatureModules
from ...monitor.open_step import OpenStep, RunSetup, StepObserver
from ...options.config import Config
from ..operands.tensors import TensorObservation, append_what_if_rows, sort_in_use_rows_first
from .capture import ActivationCapture, ObservedActivation, find_observed_activations
from .table import COUNTS, METRICS, TABLES


def activation_columns(stats: Sequence[OperandStats], keys: Sequence[Key]) -> dict[str, list[Any]]:
    """Return the columns of metrics that only activations have. An unavailable metric is None.

    Args:
        keys: (layer, role) of each row. An aggregate of experts has none of these metrics.
    """
    known = {s.key: _OF_ROLE[s.key[1]](s.further) for s in stats if s.further is not None and s.key[1] in _OF_ROLE}
    found = [known.get(key, {}) for key in keys]
    return {name: [of.get(name) for of in found] for name in (*COUNTS, *METRICS, "loads")}


def of_channels(sums: torch.Tensor) -> dict[str, float | None]:
    """Return the metrics of a norm's input or output.

    Args:
        sums: number of rows and the sum of squares of each channel, float64 [1 + C].

    Returns:
        The number of rows, the channel with the largest root mean square, and the ratio of this root mean square to that of
        the median channel.

    Example:
        >>> of_channels(torch.tensor([10.0, 1.0, 1.0, 400.0], dtype=torch.float64))
        {'rows': 10.0, 'channel': 2.0, 'channel_ratio': 20.0}
    """
    rows, squares = float(sums[0]), sums[1:]
    channel, median = int(squares.argmax()), float(squares.quantile(0.5))
    ratio = _ratio(float(squares[channel]), median)
    return {"rows": rows, "channel": float(channel), "channel_ratio": None if ratio is None else ratio**0.5}


def of_attention(sums: torch.Tensor) -> dict[str, float | None]:
    """Return the metrics of rows of attention.

    Args:
        sums: totals of `sum_attention_entropies` over calls and ranks, float64 [3].

    Example:
        >>> of_attention(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
        {'rows': 4.0, 'entropy': 0.5, 'sink_pct': 25.0}
    """
    rows, entropies, first = sums.tolist()
    sink = _ratio(first, rows)
    return {"rows": rows, "entropy": _ratio(entropies, rows), "sink_pct": None if sink is None else 100 * sink}


def of_router(sums: torch.Tensor) -> dict[str, Any]:
    """Return the metrics of a router with E experts.

    Args:
        sums: number of tokens, the sum of their entropies, the number of requested experts (0 if unknown), and the number
            of tokens that each expert received: float64 [3 + E].

    Returns:
        The number of tokens, their mean entropy in nats, the ratio of the largest to the mean load of an expert, the number
        of experts without tokens, the percentage of dropped requests, and each expert's number of tokens.

    Example:
        >>> of_router(torch.tensor([4.0, 2.0, 8.0, 4.0, 2.0, 0.0], dtype=torch.float64))
        {'rows': 4.0, 'entropy': 0.5, 'load_ratio': 2.0, 'idle_experts': 1.0, 'dropped_pct': 25.0, 'loads': [4, 2, 0]}
    """
    tokens, entropies, asked = sums[:3].tolist()
    load = sums[3:]
    given = float(load.sum())
    return {
        "rows": tokens,
        "entropy": _ratio(entropies, tokens),
        "load_ratio": _ratio(float(load.max()) * len(load), given),
        "idle_experts": float((load == 0).sum()) if given else None,
        "dropped_pct": 100 * (1 - given / asked) if asked and given else None,
        "loads": [int(n) for n in load.tolist()] if given else None,
    }


_OF_ROLE = {
    "norm_input": of_channels,
    "norm_output": of_channels,
    "attention_logits": of_attention,
    "router_logits": of_router,
}


def _ratio(a: float, b: float) -> float | None:
    """Return a / b, or None if it is not a finite number."""
    found = a / b if b else float("nan")
    return None if found != found or abs(found) == float("inf") else found


NAME = "activations"


def find_observed_modules(scanned: Sequence[ScannedModule], config: Config, errors: ErrorGuard) -> FeatureModules:
    """Return the modules whose activations to observe, as `ObservedActivation`. Warn about modules that are left out."""
    if not config.activations:
        return FeatureModules()
    sites, compiled = find_observed_activations(scanned, config.activations, find_attention_score_modules(scanned))
    if compiled:
        errors.warn(
            f"the activations of {len(compiled)} modules (first {compiled[0]}) are not observed: they run inside "
            "torch.compile, where a hook would change the graph"
        )
    roles = {role for site in sites for role in site.roles}
    for kind in config.activations:
        if not compiled and not roles & {*ACTIVATIONS[kind]}:
            errors.warn(f"activations includes {kind!r}, but the model has no supported module of this kind")
    return FeatureModules(sites, {(site.gemm.name, role): site.gemm.kind for site in sites for role in site.roles})


def make_observation(setup: RunSetup) -> ActivationObservation | None:
    """Return the observation of activations, or None if it is not enabled."""
    return ActivationObservation(setup) if setup.config.activations else None


class ActivationStep(StepObserver):
    """The observer of activations in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        found: Sequence[ObservedActivation] = step.watched.model.features[NAME].modules
        chosen, compiled = compile_layer_patterns(step.config.layers), _compiled(found)
        self._sites = [s for s in found if chosen(s.gemm.name) and id(s.gemm.module) not in compiled]
        counts, what_if = partial(is_counted_here, rank=step.watched.rank, first=None), step.config.what_if_recipes
        self._operands: dict[Key, OperandAccumulator] = {
            (site.gemm.name, role): UncastAccumulator(
                site.gemm, role, make_unquantized_cast(role), what_if, never_count_here if site.is_duplicate else counts
            )
            for site in self._sites
            for role in site.roles
        }
        step.operands |= self._operands

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        if self._operands:
            ActivationCapture(self._sites, self._operands, step.lose, step.dispatcher).subscribe()


def _compiled(found: Sequence[ObservedActivation]) -> Collection[int]:
    return find_compiled_modules(scan_modules(site.gemm.module for site in found))


class ActivationObservation(TensorObservation):
    """The observation of activations."""

    name = NAME
    roles = TABLES[0].roles

    def __init__(self, setup: RunSetup) -> None:
        kinds = setup.shard_group.tensors
        super().__init__({key: kind for key, kind in kinds.items() if key[1] in self.roles}, setup.ranks)

    def start_observer(self, step: OpenStep) -> ActivationStep:
        """See `FeatureObservation`."""
        return ActivationStep(step)

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        found = self.measure_tensors(sampled)
        if not found.metrics["layer"]:
            return {}
        keys = list(zip(found.metrics["layer"], found.metrics["role"], strict=True))
        own = activation_columns(sampled.whole[self.name], keys)
        activations, histograms = (table.name for table in TABLES)
        return {activations: append_what_if_rows(found.metrics, found.what_if, own), histograms: found.histograms}

    def finish_tables(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """Return the rows of all pipeline stages: first all rows in use, then all rows under other recipes."""
        name = TABLES[0].name
        return {name: sort_in_use_rows_first(tables[name])} if tables.get(name) else {}
