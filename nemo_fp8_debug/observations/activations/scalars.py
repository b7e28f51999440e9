"""TensorBoard tags of tensors between GEMMs."""

from __future__ import annotations

from collections import defaultdict

from ...core.sample import Sample
from ...record.scalars import SPREAD, Tags
from .table import METRICS, TABLES


def add_scalars(sample: Sample, tags: Tags) -> None:
    """Add the metrics of all tensors, and the spread of each metric that only activations have."""
    columns, values = sample.get_table(TABLES[0].name), defaultdict[str, list[float]](list)
    for metric in METRICS if columns else ():
        for role, value in zip(columns["role"], columns.get(metric, ()), strict=False):
            if value is not None:
                values[f"fp8_activations/{metric}/{role}"].append(value)
    tags.sum_up_uncast("fp8_activations", columns)
    tags.sum_up(values, SPREAD)
