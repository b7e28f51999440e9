"""The table of gradients: a row for each weight of a GEMM that has one."""

from __future__ import annotations

from ...core.table import SAMPLE, Metric, Table, typed

METRICS = {
    "norm": Metric("norm of dW", scale="log"),
    "weight_norm": Metric("norm of W", scale="log"),
}

TABLES = (
    Table(
        "gradients",
        {
            **SAMPLE,
            **typed("float64", "consumed_samples"),
            **typed("string", "layer", "gemm"),
            **typed("float64", *METRICS),
            **typed("int64", "zeros", "nonfinite", "elements", "ranks"),
        },
    ),
)
