"""The table of copies: a row for each tensor that ranks may hold copies of."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, typed

TABLES = (
    Table(
        "replicas",
        {
            **SAMPLE,
            **typed("float64", "consumed_samples"),
            **typed("string", "layer", "gemm", "what", "outcome"),
            **typed("int64", "ranks", "ranks_apart", "rank"),
        },
    ),
)
