"""The table of copies, with a row for each tensor that several ranks may have copies of."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, declare_columns

TABLES = (
    Table(
        "replicas",
        {
            **SAMPLE,
            **declare_columns("float64", "consumed_samples"),
            **declare_columns("string", "layer", "gemm", "what", "outcome"),
            **declare_columns("int64", "ranks", "ranks_apart", "rank"),
        },
    ),
)
