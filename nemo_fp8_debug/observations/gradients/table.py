"""The table of gradients: one row for each weight of a GEMM that has a gradient."""

from __future__ import annotations

from ...core.table import SAMPLE, MetricDisplay, Table, declare_columns

METRICS = {
    "norm": MetricDisplay("norm of dW", scale="log"),
    "weight_norm": MetricDisplay("norm of W", scale="log"),
}

TABLES = (
    Table(
        "gradients",
        {
            **SAMPLE,
            **declare_columns("float64", "consumed_samples"),
            **declare_columns("string", "layer", "gemm"),
            **declare_columns("float64", *METRICS),
            **declare_columns("int64", "zeros", "nonfinite", "elements", "ranks"),
        },
    ),
)
