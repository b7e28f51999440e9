"""Tables of products of GEMMs: how large their errors are, and whether they are right."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, declare_columns

#: errors of a GEMM's output, and the contribution of each operand
OUTPUT_METRICS = ("relative_error", "error_of_input", "error_of_weight", "error_of_grad_output")
OUTPUTS = Table(
    "outputs",
    {
        **SAMPLE,
        **declare_columns("float64", "consumed_samples"),
        **declare_columns("string", "layer", "gemm", "product", "recipe", "scale_source"),
        **declare_columns("int64", "ranks", "experts", "n"),
        **declare_columns("float64", *OUTPUT_METRICS),
    },
)
#: a row for each product, and for each gradient summed over ranks
VERIFICATION = Table(
    "verification",
    {
        **SAMPLE,
        **declare_columns("float64", "consumed_samples"),
        **declare_columns("string", "layer", "gemm", "product", "outcome", "reason", "shape"),
        **declare_columns("int64", "rank", "ranks", "ranks_beyond", "ranks_unknown", "values"),
        **declare_columns("float64", "error_over_bound", "factor", "relative_error"),
        **declare_columns("int64", "row", "column", "values_beyond", "rows_beyond", "columns_beyond"),
    },
    checks="GEMM results",
    option="verify_rows",
)
TABLES = (OUTPUTS, VERIFICATION)
