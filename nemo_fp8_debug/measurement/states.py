"""Metrics of what optimizers keep that need other tensors too: shares of the norm over all layers, and steps by weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.layer_names import is_aggregate
from ..numerics.metric_names import STATE_METRICS

_Columns = Mapping[str, Sequence[Any]]


def state_columns(states: _Columns, norms: _Columns) -> dict[str, list[float | None]]:
    """Columns beside those that all tensors have; None where a metric cannot be had, and under what-if recipes.

    Args:
        states: layer, role and scale_source of their rows.
        norms: layer, role and norm of those and of the weights before the step, of all layers of the model.

    Returns:
        norm; share_pct (of the sum of squares of all tensors of the same role); update_to_weight (norm of what a step adds
        to a weight, over that of the weight).

    Example:
        >>> about = {"layer": ["a", "b"], "role": ["weight_gradient"] * 2}
        >>> state_columns({**about, "scale_source": ["not quantized"] * 2}, {**about, "norm": [3.0, 4.0]})["share_pct"]
        [36.0, 64.0]
    """
    of = {(layer, role): norm for layer, role, norm in zip(*(norms[n] for n in ("layer", "role", "norm")), strict=True)}
    totals = defaultdict[str, float](float)
    for (layer, role), norm in of.items():
        totals[role] += 0.0 if is_aggregate(layer) else norm**2
    found: dict[str, list[float | None]] = {name: [] for name in STATE_METRICS}
    for layer, role, source in zip(*(states[name] for name in ("layer", "role", "scale_source")), strict=True):
        norm = None if source == "what-if" else of[layer, role]
        weight = of.get((layer, "weight")) if role == "update" else None
        found["norm"].append(norm)
        found["share_pct"].append(100 * norm**2 / totals[role] if norm is not None and totals[role] else None)
        found["update_to_weight"].append(norm / weight if norm is not None and weight else None)
    return found
