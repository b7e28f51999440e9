"""What lies between the GEMMs of two runs, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from ...analysis.comparison.drift import ROOT_MEAN_SQUARE, TAIL
from ...analysis.formatting import format_number
from ...analysis.runs.run import Run
from ...core.keys import SHOWN_AS
from ...numerics.metric_names import name_metric
from .table import TABLES

#: name in JSON, title of the table, and its columns behind layer and tensor
NAME, TITLE = TABLES[0].name, "What lies between GEMMs, baseline -> run, medians over the later half of the run"
HEADINGS = ("metric", "baseline", "run", "log2 of the ratio")
_KEY = ["layer", "role"]
#: percentages, of which one point is added before they are divided, since they may be zero
_PERCENTAGES = ("sink_pct", "dropped_pct")
_METRICS = ("size", "amax", *(name for name in TABLES[0].metrics if name != "idle_experts"))


def compare_runs(baseline: Run, run: Run) -> pl.DataFrame:
    """Return how far activations are apart, over the later half of the samples that both runs have.

    Returns:
        A row an activation and metric: layer, role, tensor (as people write the role), metric (`size` is the root mean
        square), baseline and run (medians), ratio_log2 (the log2 of their ratio, of percentages with a point added to
        each); the farthest apart first. Empty where a record has none.

    Example:
        >>> from nemo_fp8_debug.analysis.runs.run import Run
        >>> compare_runs(Run.read("runs/baseline"), Run.read("runs/bad")).columns[2:]
        ['tensor', 'metric', 'baseline', 'run', 'ratio_log2']
    """
    rows = _values(baseline).join(_values(run), on=["step", "metric", *_KEY], suffix="_run")
    steps = rows["step"].unique().sort()
    later = rows.filter(pl.col("step").is_in(steps.tail(max(1, round(len(steps) * TAIL))).implode()))
    medians = pl.col("value").median().alias("baseline"), pl.col("value_run").median().alias("run")
    found = later.group_by("metric", *_KEY, maintain_order=True).agg(*medians)
    added = pl.when(pl.col("metric").is_in(_PERCENTAGES)).then(1.0).otherwise(0.0)
    ratio = ((pl.col("run") + added) / (pl.col("baseline") + added)).log(2)
    named = found.with_columns(
        tensor=pl.col("role").replace_strict(SHOWN_AS, return_dtype=pl.String),
        ratio_log2=pl.when(ratio.is_finite()).then(ratio),
    )
    ordered = named.sort(-pl.col("ratio_log2").abs(), nulls_last=True, maintain_order=True)
    return ordered.select(*_KEY, "tensor", "metric", "baseline", "run", "ratio_log2")


def _values(run: Run) -> pl.DataFrame:
    """step, layer, role, metric, value"""
    rows = run.table(NAME).filter(pl.col("scale_source") != "what-if").with_columns(size=ROOT_MEAN_SQUARE)
    return rows.unpivot(_METRICS, index=["step", *_KEY], variable_name="metric").drop_nulls("value")


def show_row(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a row of `compare_runs`, behind layer and tensor."""
    yield name_metric(row["metric"])
    yield from (format_number(row[name]) for name in ("baseline", "run", "ratio_log2"))
