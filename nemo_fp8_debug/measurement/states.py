"""Metrics of what optimizers keep that need other tensors too: shares of the norm over all layers, and steps by weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.keys import UNCAST
from ..core.layer_names import is_aggregate
from ..numerics.adam import UPDATE_SUMS
from ..numerics.metric_names import STATE_METRICS, UPDATE_METRICS
from .operand_stats import OperandStats

_Columns = Mapping[str, Sequence[Any]]


def norm_columns(stats: Sequence[OperandStats], squares: torch.Tensor) -> dict[str, list[Any]]:
    """layer, role and norm of weights and of what optimizers keep of them.

    Args:
        squares: the sum of squares of each.
    """
    norms = zip(stats, squares.double().sqrt().tolist(), strict=True)
    found = [(*s.key, norm) for s, norm in norms if s.key[1] in ("weight", *UNCAST["states"])]
    return dict(zip(("layer", "role", "norm"), map(list, zip(*found, strict=True)), strict=True)) if found else {}


def update_columns(stats: Sequence[OperandStats]) -> dict[str, list[Any]]:
    """layer and `UPDATE_METRICS` of the weights whose steps were compared with exact ones; None of what is not known."""
    known = [(s.key[0], s.further) for s in stats if s.key[1] == "update" and s.further is not None and s.further[0] > 0]
    found = [(layer, of_update(sums)) for layer, sums in known]
    columns: dict[str, list[Any]] = {name: [of[name] for _, of in found] for name in UPDATE_METRICS}
    return {"layer": [layer for layer, _ in found], **columns} if found else {}


def of_update(sums: torch.Tensor) -> dict[str, float | None]:
    """The errors of a step, as parts of the norm of the exact one.

    Args:
        sums: float64, as `numerics.adam.UPDATE_SUMS`.

    Example:
        >>> found = of_update(torch.tensor([9.0, 4.0, 1.0, 1.0, 1.0, 0.0, 100.0, 1.0, 1.0], dtype=torch.float64))
        >>> found["update_error"], found["error_of_first_moment"]
        (0.2, 0.1)
    """
    of = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
    parts = [of[f"{name}_error2"] for name in ("weight_gradient", "first_moment", "second_moment", "weight")]
    errors: list[float | None] = [(x / of["update2"]) ** 0.5 if of["update2"] else None for x in (of["error2"], *parts)]
    if of["parts_with_gradient"] < of["parts"]:
        errors[1] = None
    return dict(zip(UPDATE_METRICS, errors, strict=True))


def state_columns(states: _Columns, norms: _Columns, updates: _Columns) -> dict[str, list[float | None]]:
    """Columns beside those that all tensors have; None where a metric cannot be had, and under what-if recipes.

    Args:
        states: layer, role and scale_source of their rows.
        norms: layer, role and norm of those and of the weights before the step, of all layers of the model.
        updates: as of `update_columns`.

    Returns:
        norm; share_pct (of the sum of squares of all tensors of the same role); update_to_weight (norm of what a step adds
        to a weight, over that of the weight).

    Example:
        >>> about = {"layer": ["a", "b"], "role": ["weight_gradient"] * 2}
        >>> state_columns({**about, "scale_source": ["not quantized"] * 2}, {**about, "norm": [3.0, 4.0]}, {})["share_pct"]
        [36.0, 64.0]
    """
    of = {(layer, role): norm for layer, role, norm in zip(*(norms[n] for n in ("layer", "role", "norm")), strict=True)}
    totals = defaultdict[str, float](float)
    for (layer, role), norm in of.items():
        totals[role] += 0.0 if is_aggregate(layer) else norm**2
    errors = {layer: i for i, layer in enumerate(updates.get("layer", ()))}
    found: dict[str, list[float | None]] = {name: [] for name in (*STATE_METRICS, *UPDATE_METRICS)}
    for layer, role, source in zip(*(states[name] for name in ("layer", "role", "scale_source")), strict=True):
        norm = None if source == "what-if" else of[layer, role]
        weight = of.get((layer, "weight")) if role == "update" else None
        found["norm"].append(norm)
        found["share_pct"].append(100 * norm**2 / totals[role] if norm is not None and totals[role] else None)
        found["update_to_weight"].append(norm / weight if norm is not None and weight else None)
        at = errors.get(layer) if role == "update" and source != "what-if" else None
        for name in UPDATE_METRICS:
            found[name].append(None if at is None else updates[name][at])
    return found
