"""Tables of a framework's scalars: a row for each step, and a row for each loss of an evaluation."""

from __future__ import annotations

from ...core.keys import STEP_SCALARS
from ...core.table import SAMPLE, Table, declare_columns

TABLES = (
    # Values that we read only on sampled steps are null on other steps.
    Table("steps", {**SAMPLE, **declare_columns("float64", "time", *STEP_SCALARS), **declare_columns("string", "trigger")}),
    Table(
        "validation",
        {
            **SAMPLE,
            **declare_columns("float64", "time"),
            **declare_columns("string", "name"),
            **declare_columns("float64", "loss"),
        },
    ),
)
