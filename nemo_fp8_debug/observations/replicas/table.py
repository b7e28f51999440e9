"""The table of copies, with a row for each tensor that several ranks may have copies of."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, cast_columns

TABLES = (
    Table(
        "replicas",
        {
            **SAMPLE,
            **cast_columns("float64", "consumed_samples"),
            **cast_columns("string", "layer", "gemm", "what", "outcome"),
            **cast_columns("int64", "ranks", "ranks_apart", "rank"),
        },
    ),
)
