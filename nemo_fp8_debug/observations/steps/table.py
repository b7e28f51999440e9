"""Tables of a framework's scalars: a row for each step, and a row for each loss of an evaluation."""

from __future__ import annotations

from ...core.keys import STEP_SCALARS
from ...core.table import SAMPLE, Table, cast_columns

TABLES = (
    # Values that we read only on sampled steps are null on other steps.
    Table("steps", {**SAMPLE, **cast_columns("float64", "time", *STEP_SCALARS), **cast_columns("string", "trigger")}),
    Table(
        "validation",
        {**SAMPLE, **cast_columns("float64", "time"), **cast_columns("string", "name"), **cast_columns("float64", "loss")},
    ),
)
