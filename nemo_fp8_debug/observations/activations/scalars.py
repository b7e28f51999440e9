"""TensorBoard tags of tensors between GEMMs."""

from __future__ import annotations

from collections import defaultdict

from ...core.sample import Sample
from ...record.scalars import SPREAD, ScalarTags
from .table import METRICS, TABLES


def add_scalars(sample: Sample, tags: ScalarTags) -> None:
    """Add the metrics of all tensors, and the spread of each metric that only activations have."""
    columns, values = sample.get_table(TABLES[0].name), defaultdict[str, list[float]](list)
    for metric in METRICS if columns else ():
        for role, value in zip(columns["role"], columns.get(metric, ()), strict=False):
            if value is not None:
                values[f"fp8_activations/{metric}/{role}"].append(value)
    tags.add_uncast_tags("fp8_activations", columns)
    tags.add_combined_tags(values, SPREAD)
