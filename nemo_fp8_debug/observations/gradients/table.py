"""The table of gradients: one row for each weight of a GEMM that has a gradient."""

from __future__ import annotations

from ...core.table import SAMPLE, Metric, Table, cast_columns

METRICS = {
    "norm": Metric("norm of dW", scale="log"),
    "weight_norm": Metric("norm of W", scale="log"),
}

TABLES = (
    Table(
        "gradients",
        {
            **SAMPLE,
            **cast_columns("float64", "consumed_samples"),
            **cast_columns("string", "layer", "gemm"),
            **cast_columns("float64", *METRICS),
            **cast_columns("int64", "zeros", "nonfinite", "elements", "ranks"),
        },
    ),
)
