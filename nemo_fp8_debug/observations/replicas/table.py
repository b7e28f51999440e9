"""The table of copies: a row for each tensor that ranks may hold copies of."""

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
