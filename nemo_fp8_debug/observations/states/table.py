"""Tables of optimizer states: metrics, in use and under other recipes, and histograms."""

from __future__ import annotations

from ...core.keys import STATES
from ...core.table import Metric, Table, cast_columns
from ..operands.table import HISTOGRAMS, TENSORS

#: metrics of tensors of the optimizer
STATE_METRICS = {
    "norm": Metric("norm", scale="log"),
    "share_pct": Metric("share of all squared norms", "%"),
    "update_to_weight": Metric("step of W / W", scale="log"),
}
#: metrics of a weight's step: its error, and the contribution of each source
UPDATE_METRICS = {
    "update_error": Metric("error of the step of W", scale="log"),
    "error_of_weight_gradient": Metric("error of the step of W by dW", scale="log"),
    "error_of_first_moment": Metric("error of the step of W by m", scale="log"),
    "error_of_second_moment": Metric("error of the step of W by v", scale="log"),
    "error_of_weight": Metric("error of the step of W by its rounding", scale="log"),
}
_METRICS = {**STATE_METRICS, **UPDATE_METRICS}

TABLES = (
    Table(
        "states",
        {**TENSORS, **cast_columns("float64", *_METRICS)},
        _METRICS,
        tuple(STATES),
        "state_histograms",
        has_what_if=True,
        checks="optimizer states",
        option="states",
    ),
    Table("state_histograms", HISTOGRAMS, by_step=True),
)
