"""Tables of what a host reports: a row for each step, and one for each loss of an evaluation."""

from __future__ import annotations

from ...core.keys import STEP_SCALARS
from ...core.table import SAMPLE, Table, typed

TABLES = (
    # What is read on sampled steps only is null on others.
    Table("steps", {**SAMPLE, **typed("float64", "time", *STEP_SCALARS), **typed("string", "trigger")}),
    Table("validation", {**SAMPLE, **typed("float64", "time"), **typed("string", "name"), **typed("float64", "loss")}),
)
