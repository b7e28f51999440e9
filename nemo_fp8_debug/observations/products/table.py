"""The table of verified products: a row for each product of a GEMM, and for each gradient that ranks add up."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, typed

TABLES = (
    Table(
        "verification",
        {
            **SAMPLE,
            **typed("float64", "consumed_samples"),
            **typed("string", "layer", "gemm", "product", "outcome", "reason", "shape"),
            **typed("int64", "rank", "ranks", "ranks_beyond", "ranks_unknown", "values"),
            **typed("float64", "error_over_bound", "factor", "relative_error"),
            **typed("int64", "row", "column", "values_beyond", "rows_beyond", "columns_beyond"),
        },
    ),
)
