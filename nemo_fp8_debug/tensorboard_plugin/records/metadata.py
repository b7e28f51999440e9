"""Describe metrics, formats and the order of layers for the browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...core.keys import SHOWN_AS
from ...numerics.metric_names import LABELS, METRICS, UNITS, WORSE
from ...record import schema
from ...record.schema import SCHEMAS, Part
from .part_matrices import NONFINITE, RowLayout, TensorKeys

ROLES = dict(SHOWN_AS)
#: tables of tensors, and the tables of their histograms
TABLES = {table.name: table.histograms for table in schema.TABLES.values() if table.roles}
#: metrics that requests may name: all numeric columns, without columns that identify the row
NUMBERS = (
    *dict.fromkeys(
        name
        for table in TABLES
        for name, kind in SCHEMAS[table].items()
        if kind.is_numeric() and name not in ("attempt", "step")
    ),
    NONFINITE,
)
#: color scales that are not linear
_SCALES = {
    **dict.fromkeys(("mse", "relative_error", "amax", "amin", "kurtosis"), "log"),
    "scale_ratio_log2": "diverging",
}
#: the formats of `numerics.formats`, for a process that does not import torch
FORMATS: dict[str, dict[str, float]] = {
    "e4m3": {"max": 448.0, "min_normal": 2.0**-6, "min_subnormal": 2.0**-9, "bits": 8},
    "e5m2": {"max": 57344.0, "min_normal": 2.0**-14, "min_subnormal": 2.0**-16, "bits": 8},
    "e2m1": {"max": 6.0, "min_normal": 1.0, "min_subnormal": 0.5, "bits": 4},
    "bf16": {"max": (2 - 2.0**-7) * 2.0**127, "min_normal": 2.0**-126, "min_subnormal": 2.0**-133, "bits": 16},
    "fp16": {"max": 65504.0, "min_normal": 2.0**-14, "min_subnormal": 2.0**-24, "bits": 16},
}


def describe_metrics() -> list[dict[str, Any]]:
    """Return the metrics for the browser: name, label, unit, worse, scale, and table if only one table has the metric."""
    offered = [_about(name, name) for name in METRICS]
    offered += [_about(f"unscaled_{name}", name, ", in the units of the loss") for name in UNITS]
    scale = {"name": "scale", "label": "scale in use", "unit": "", "worse": 1, "scale": "log"}
    nonfinite = {"name": NONFINITE, "label": "NaN and infinities", "unit": "values", "worse": 1, "scale": "linear"}
    own = [
        {"name": name, "label": m.label, "unit": m.unit, "worse": m.worse, "scale": m.scale, "table": table}
        for table in TABLES
        for name, m in schema.TABLES[table].metrics.items()
    ]
    return [*offered, scale, nonfinite, *own]


def find_worse_sign(metric: str) -> int | None:
    """Return 1 if higher values are worse, -1 if lower values are worse, and None if values farther from 0 are worse.

    Example:
        >>> find_worse_sign("underflow_pct"), find_worse_sign("cosine"), find_worse_sign("scale_ratio_log2")
        (1, -1, None)
    """
    return _WORSE.get(metric, 1)


def find_table_of_role(role: str) -> str:
    """Return the table that contains tensors of a role.

    Example:
        >>> find_table_of_role("input"), find_table_of_role("first_moment")
        ('metrics', 'states')
    """
    return next((table for table in TABLES if role in schema.TABLES[table].roles), next(iter(TABLES)))


def _about(name: str, like: str, more: str = "") -> dict[str, Any]:
    label, unit = LABELS[like]
    return {"name": name, "label": label + more, "unit": unit, "worse": WORSE[like], "scale": _SCALES.get(like, "linear")}


_WORSE = {about["name"]: None if about["scale"] == "diverging" else about["worse"] for about in describe_metrics()}
#: layers that a model defines before their siblings but runs after them: Megatron's output projection of attention
_LAST = {"linear_proj"}
#: layers that run after certain siblings, if these exist: `w2` of a gated MLP reads the results of `w1` and `w3`
_BEHIND = {"w2": "w3"}
#: number of records for which the order is cached
_KEPT = 32


def sort_tensors_by_execution(tensors: Iterable[tuple[str, str]]) -> TensorKeys:
    """Sort the (layer, role) of tensors by the layers' order of execution. Keep the order within a layer."""
    found = list(tensors)
    order = {layer: i for i, layer in enumerate(order_layers([layer for layer, _ in found]))}
    return TensorKeys(sorted(found, key=lambda key: order[key[0]]))


def list_tensors(layouts: Mapping[Part, RowLayout]) -> TensorKeys:
    """Return (layer, role) of the tensors of all parts, in order of execution."""
    return _of_any(tuple(dict.fromkeys(layout.tensors for layout in layouts.values())))


@lru_cache(_KEPT)
def _of_any(different: tuple[TensorKeys, ...]) -> TensorKeys:
    return sort_tensors_by_execution(dict.fromkeys(key for tensors in different for key in tensors))


def order_layers(layers: Sequence[str]) -> list[str]:
    """Return each layer once, in the order of the forward pass.

    Example:
        >>> order_layers(["0.attention.linear_proj", "0.attention.linear_qkv", "0.mlp.linear_fc1"])
        ['0.attention.linear_qkv', '0.attention.linear_proj', '0.mlp.linear_fc1']
    """
    place = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
    last_of = {layer.rpartition(".")[0]: i for layer, i in place.items()}

    def key(layer: str) -> tuple[int, int]:
        block, _, name = layer.rpartition(".")
        sibling = f"{block}.{_BEHIND[name]}" if name in _BEHIND else None
        if name in _LAST:
            return last_of[block], 1
        return (place[sibling], 1) if sibling in place and place[sibling] > place[layer] else (place[layer], 0)

    return sorted(place, key=key)
