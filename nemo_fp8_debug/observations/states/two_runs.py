"""Compare the optimizer states of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from ...analysis.comparison.drift import ROOT_MEAN_SQUARE, TAIL
from ...analysis.runs.run import Run
from ...core.keys import SHOWN_AS
from ...core.text import format_number
from .table import TABLES

#: name in JSON, title of the table, and its columns after layer and tensor
NAME, TITLE = TABLES[0].name, "Optimizer states, baseline -> run, medians over the later half of the run"
HEADINGS = ("size (log2 of the ratio)", "root mean square", "share of the squared norm %", "NaN or infinity since")
_KEY = ["layer", "role"]
_SHOWN = ("rms_baseline", "rms_run", "size_log2", "share_baseline", "share_run")


def compare_runs(baseline: Run, run: Run) -> pl.DataFrame:
    """Compare the optimizers' tensors over the later half of the samples in both runs.

    Returns:
        One row for each weight and state: layer, role, tensor (the symbol of the role), rms_baseline and rms_run (root mean
        squares), size_log2 (log2 of their ratio), share_baseline and share_run (percent of all squared norms), and
        nonfinite_since (first step with NaN or infinity in the run but not in the baseline). All other values are medians.
        Tensors that are not finite come first, then the largest ratios. There are no rows if a record has no states.

    Example:
        >>> from nemo_fp8_debug.analysis.runs.run import Run
        >>> compare_runs(Run.read("runs/baseline"), Run.read("runs/bad")).columns[:3]
        ['layer', 'role', 'tensor']
    """
    rows = _sizes(baseline).join(_sizes(run), on=["step", *_KEY], suffix="_run")
    steps = rows["step"].unique().sort()
    later = pl.col("step").is_in(steps.tail(max(1, round(len(steps) * TAIL))).implode())
    lost = pl.col("step").filter((pl.col("lost_run") > 0) & (pl.col("lost") == 0)).min()
    found = rows.group_by(_KEY, maintain_order=True).agg(
        pl.col("rms").filter(later).median().alias("rms_baseline"),
        pl.col("rms_run").filter(later).median(),
        (pl.col("rms_run") / pl.col("rms")).log(2).filter(later).median().alias("size_log2"),
        pl.col("share_pct").filter(later).median().alias("share_baseline"),
        pl.col("share_pct_run").filter(later).median().alias("share_run"),
        lost.alias("nonfinite_since"),
    )
    named = found.with_columns(tensor=pl.col("role").replace_strict(SHOWN_AS, return_dtype=pl.String))
    ordered = named.sort("nonfinite_since", -pl.col("size_log2").abs(), nulls_last=True, maintain_order=True)
    return ordered.select(*_KEY, "tensor", *_SHOWN, "nonfinite_since")


def _sizes(run: Run) -> pl.DataFrame:
    """Return rows of step, layer, role, share_pct, rms (null if zero or unknown) and lost (NaN and infinite values)."""
    rows = run.read_table(NAME).filter(pl.col("scale_source") != "what-if")
    return rows.select("step", *_KEY, "share_pct", rms=ROOT_MEAN_SQUARE, lost=pl.col("nan") + pl.col("inf"))


def format_comparison_cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a row of `compare_runs` after layer and tensor."""
    yield format_number(row["size_log2"])
    for name in ("rms", "share"):
        yield f"{format_number(row[f'{name}_baseline'])} -> {format_number(row[f'{name}_run'])}"
    yield "-" if row["nonfinite_since"] is None else str(row["nonfinite_since"])
