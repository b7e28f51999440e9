"""Tables of optimizer states: metrics, in use and under other recipes, and histograms."""

from __future__ import annotations

from ...core.keys import STATES
from ...core.table import MetricDisplay, Table, declare_columns
from ..operands.table import HISTOGRAMS, TENSORS

#: metrics of tensors of the optimizer
STATE_METRICS = {
    "norm": MetricDisplay("norm", scale="log"),
    "share_pct": MetricDisplay("share of all squared norms", "%"),
    "update_to_weight": MetricDisplay("step of W / W", scale="log"),
}
#: metrics of a weight's step: its error, and the contribution of each source
UPDATE_METRICS = {
    "update_error": MetricDisplay("error of the step of W", scale="log"),
    "error_of_weight_gradient": MetricDisplay("error of the step of W by dW", scale="log"),
    "error_of_first_moment": MetricDisplay("error of the step of W by m", scale="log"),
    "error_of_second_moment": MetricDisplay("error of the step of W by v", scale="log"),
    "error_of_weight": MetricDisplay("error of the step of W by its rounding", scale="log"),
}
_METRICS = {**STATE_METRICS, **UPDATE_METRICS}

TABLES = (
    Table(
        "states",
        {**TENSORS, **declare_columns("float64", *_METRICS)},
        _METRICS,
        tuple(STATES),
        "state_histograms",
        has_what_if=True,
        checks="optimizer states",
        option="states",
    ),
    Table("state_histograms", HISTOGRAMS, by_step=True),
)
