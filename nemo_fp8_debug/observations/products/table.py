"""Tables of products of GEMMs: how large their errors are, and whether they are right."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, typed

#: errors of what a GEMM puts out, and what each operand brings
OUTPUT_METRICS = ("relative_error", "error_of_input", "error_of_weight", "error_of_grad_output")
OUTPUTS = Table(
    "outputs",
    {
        **SAMPLE,
        **typed("float64", "consumed_samples"),
        **typed("string", "layer", "gemm", "product", "recipe", "scale_source"),
        **typed("int64", "ranks", "experts", "n"),
        **typed("float64", *OUTPUT_METRICS),
    },
)
#: a row for each product, and for each gradient that ranks add up
VERIFICATION = Table(
    "verification",
    {
        **SAMPLE,
        **typed("float64", "consumed_samples"),
        **typed("string", "layer", "gemm", "product", "outcome", "reason", "shape"),
        **typed("int64", "rank", "ranks", "ranks_beyond", "ranks_unknown", "values"),
        **typed("float64", "error_over_bound", "factor", "relative_error"),
        **typed("int64", "row", "column", "values_beyond", "rows_beyond", "columns_beyond"),
    },
    checks="GEMM results",
    option="verify_rows",
)
TABLES = (OUTPUTS, VERIFICATION)
