"""TensorBoard tags of operands: metrics of each tensor, gradients in units of the loss, and errors under other recipes."""

from __future__ import annotations

import math
from collections import defaultdict

from ...core.keys import ROLES
from ...core.layer_names import is_expert_aggregate
from ...core.sample import Sample
from ...numerics.metric_names import UNITS, WORSE
from ...record.scalars import STREAMED, WORST, ScalarTags

#: metrics that are logged for recipes that were not in use
_UNDER_OTHERS = ("underflow_pct", "overflow_pct", "relative_error")


def add_scalars(sample: Sample, tags: ScalarTags) -> None:
    """Add the tags of operands."""
    columns = sample.operand_columns
    for role in ROLES:
        rows = [i for i, r in enumerate(columns["role"]) if r == role]
        for metric in STREAMED:
            values = {columns["layer"][i]: columns[metric][i] for i in rows}
            values = {layer: v for layer, v in values.items() if v is not None and math.isfinite(v)}
            if values:
                tags.add_layer_metric(metric, role, values)
    _add_unscaled(sample, tags)
    _add_what_if(sample, tags)


def _add_unscaled(sample: Sample, tags: ScalarTags) -> None:
    """Add the worst and the median metrics of dY in units of the loss, and the multiplier of dY."""
    if not (multiplier := sample.scalars.get("grad_scale")):
        return
    for metric in UNITS:
        found = [
            value for value in sample.operand_columns[f"unscaled_{metric}"] if value is not None and math.isfinite(value)
        ]
        worst = max if WORSE[metric] > 0 else min
        if found:
            tags.add_combined_tags({f"fp8/unscaled_{metric}/grad_output": found}, {**WORST, "worst": worst})
    tags.values["fp8/grad_scale"] = multiplier


def _add_what_if(sample: Sample, tags: ScalarTags) -> None:
    """Add the worst and the median metrics of each role under each recipe that was not in use."""
    columns, values = sample.get_table("what_if"), defaultdict[str, list[float]](list)
    for metric in _UNDER_OTHERS if columns else ():
        rows = zip(columns["layer"], columns["recipe"], columns["role"], columns[metric], strict=True)
        for layer, recipe, role, value in rows:
            if value is not None and math.isfinite(value) and not is_expert_aggregate(layer):
                values[f"fp8_what_if/{metric}/{role}/{recipe}"].append(value)
    tags.add_combined_tags(values, WORST)
