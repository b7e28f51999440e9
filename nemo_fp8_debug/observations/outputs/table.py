"""The table of errors of what GEMMs put out: a row for each product."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, typed
from ...numerics.metric_names import OUTPUT_METRICS

TABLES = (
    Table(
        "outputs",
        {
            **SAMPLE,
            **typed("float64", "consumed_samples"),
            **typed("string", "layer", "gemm", "product", "recipe", "scale_source"),
            **typed("int64", "ranks", "experts", "n"),
            **typed("float64", *OUTPUT_METRICS),
        },
    ),
)
