"""Compare the activations (tensors between GEMMs) of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from ...analysis.comparison.drift import ROOT_MEAN_SQUARE, TAIL
from ...analysis.runs.run import Run
from ...core.keys import SHOWN_AS
from ...core.text import format_number
from ...numerics.metric_names import label_metric
from .table import TABLES

#: name in JSON, title of the table, and its columns after layer and tensor
NAME, TITLE = TABLES[0].name, "Tensors between GEMMs, baseline -> run, medians over the later half of the run"
HEADINGS = ("metric", "baseline", "run", "log2 of the ratio")
_KEY = ["layer", "role"]
#: percentages; we add one point to each before dividing, because they may be zero
_PERCENTAGES = ("sink_pct", "dropped_pct")
_METRICS = ("size", "amax", *(name for name in TABLES[0].metrics if name != "idle_experts"))


def compare_runs(baseline: Run, run: Run) -> pl.DataFrame:
    """Compare activations over the later half of the samples in both runs.

    Returns:
        One row for each activation and metric: layer, role, tensor (the symbol of the role), metric (`size` is the root mean
        square), baseline and run (medians), and ratio_log2 (log2 of their ratio). Before we divide percentages, we add one
        point to each. The largest ratios come first. There are no rows if a record has no activations.

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
    """Return rows of step, layer, role, metric and value."""
    rows = run.read_table(NAME).filter(pl.col("scale_source") != "what-if").with_columns(size=ROOT_MEAN_SQUARE)
    return rows.unpivot(_METRICS, index=["step", *_KEY], variable_name="metric").drop_nulls("value")


def format_comparison_cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells that follow layer and tensor in a row of `compare_runs`."""
    yield label_metric(row["metric"])
    yield from (format_number(row[name]) for name in ("baseline", "run", "ratio_log2"))
