"""Tables of tensors between GEMMs: metrics, in use and under other recipes, and histograms."""

from __future__ import annotations

from ...core.keys import ACTIVATIONS
from ...core.table import MetricDisplay, Table, declare_columns
from ..operands.table import HISTOGRAMS, TENSORS

#: metrics that a histogram cannot give
METRICS = {
    "channel_ratio": MetricDisplay("largest / median channel", scale="log"),
    "entropy": MetricDisplay("entropy of weights", "nats", worse=-1),
    "sink_pct": MetricDisplay("weight of the first key", "%"),
    "load_ratio": MetricDisplay("largest / mean load of experts", scale="log"),
    "idle_experts": MetricDisplay("experts without a token", "experts"),
    "dropped_pct": MetricDisplay("dropped tokens", "%"),
}
#: other columns that only activations have
COUNTS = ("rows", "channel")
_COLUMNS = {**TENSORS, **declare_columns("float64", *COUNTS, *METRICS), "loads": "list[int64]"}
_ROLES = tuple(role for roles in ACTIVATIONS.values() for role in roles)

TABLES = (
    Table("activations", _COLUMNS, METRICS, _ROLES, "activation_histograms", has_what_if=True),
    Table("activation_histograms", HISTOGRAMS, by_step=True),
)
