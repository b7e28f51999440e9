"""The job that tries a recipe on all tensors of a step."""

from __future__ import annotations

from typing import Any

import polars as pl

from ...analysis.replay.replay import replay
from ...errors import RecordError, hearing
from ...record.parts import count_rows
from ..records.tables import WHAT_IF_METRICS, in_columns

#: rows of metrics of a record that is replayed
_MOST_REPLAYED = 8_000_000


def what_if(run: str, step: int, recipe: str) -> dict[str, Any]:
    """Return metrics of all tensors at a sampled step under another recipe, from histograms.

    `rounded` marks those of float32 tensors, which are approximate.

    Raises:
        ConfigError: the recipe is none, or histograms cannot tell.
        RecordError: there are no histograms of that step.
    """
    if (rows_there := count_rows(run, "metrics")) > _MOST_REPLAYED:
        raise RecordError(f"{run} has {rows_there:,} rows of metrics, too many to replay here; run `nemo-fp8-debug replay`")
    with hearing():
        rows = replay(run, recipe, steps=[step])
    if rows.is_empty():
        raise RecordError(f"the record has no histograms of step {step} to replay; record the run with histograms")
    shown = rows.select("layer", "role", "recipe", *WHAT_IF_METRICS, "rounded").with_columns(in_use=pl.lit(False))
    return {"step": step, "rows": in_columns(shown)}
