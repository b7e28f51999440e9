"""The table of errors of what GEMMs put out: a row for each product."""

from __future__ import annotations

from ...core.table import SAMPLE, Table, typed

#: errors, of the output and what each operand brings
METRICS = ("relative_error", "error_of_input", "error_of_weight", "error_of_grad_output")

TABLES = (
    Table(
        "outputs",
        {
            **SAMPLE,
            **typed("float64", "consumed_samples"),
            **typed("string", "layer", "gemm", "product", "recipe", "scale_source"),
            **typed("int64", "ranks", "experts", "n"),
            **typed("float64", *METRICS),
        },
    ),
)
