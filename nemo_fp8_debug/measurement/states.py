"""Metrics of what optimizers keep that need other tensors too: shares of the norm over all layers, and steps by weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.layer_names import is_aggregate

_Columns = Mapping[str, Sequence[Any]]


def state_columns(states: _Columns, operands: _Columns) -> dict[str, list[float | None]]:
    """Columns beside those that all tensors have; None where a metric cannot be had, and under what-if recipes.

    Args:
        states: columns with `norm`, of all layers of the model.
        operands: likewise, W of the same layers among them, before the step.

    Returns:
        norm; share_pct (of the sum of squares of all layers, in tensors of the same role); update_to_weight (the norm of what a
        step adds to a weight over that of the weight).

    Example:
        >>> about = {"role": ["weight_gradient"] * 2, "scale_source": ["not quantized"] * 2}
        >>> state_columns({"layer": ["a", "b"], "norm": [3.0, 4.0], **about}, {})["share_pct"]
        [36.0, 64.0]
    """
    rows = list(zip(*(states[name] for name in ("layer", "role", "scale_source", "norm")), strict=True))
    totals = defaultdict[str, float](float)
    for layer, role, source, norm in rows:
        if source != "what-if" and not is_aggregate(layer):
            totals[role] += norm**2
    of_weights = _norms_of_weights(operands)
    norms, shares, ratios = [], [], []
    for layer, role, source, norm in rows:
        own, weight = None if source == "what-if" else norm, of_weights.get(layer) if role == "update" else None
        norms.append(own)
        shares.append(100 * own**2 / totals[role] if own is not None and totals[role] else None)
        ratios.append(own / weight if own is not None and weight else None)
    return {"norm": norms, "share_pct": shares, "update_to_weight": ratios}


def _norms_of_weights(operands: _Columns) -> dict[str, float]:
    if not operands:
        return {}
    rows = zip(*(operands[name] for name in ("layer", "role", "norm")), strict=True)
    return {layer: norm for layer, role, norm in rows if role == "weight"}
