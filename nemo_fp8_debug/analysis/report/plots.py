"""The plots of a page, as pieces of HTML that plotly.js draws."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..comparison.comparison import Comparison
from ..comparison.groups import placed
from ..comparison.onset import band
from ..runs.run import Run

#: points of a line; longer ones are thinned out
_POINTS = 2000
#: tensors whose metrics are drawn
_DRAWN = 6
_COLORS = {"baseline": "#2a9d8f", "run": "#e63946", "reference": "#8d6cab"}
_GRID = "rgba(128,128,128,0.25)"
#: what metrics are counted in
_UNITS = {
    "nonfinite": "1: NaN or infinity",
    "scale_ratio_log2": "log2",
    "overflow_pct": "%",
    "underflow_pct": "%",
    "relative_error": "of the RMS",
    "outlier_log2": "log2",
}


def of(found: Comparison) -> dict[str, str]:
    """By name: losses, drift, onset, timelines; those that there is something to draw for."""
    drift = found.tensors["drift_log2"].drop_nulls().to_list()
    top = max([1.0, *drift])  # as far down: a gradient that vanishes behind the culprit would take all colors
    metrics = {
        "losses": _losses(found),
        "drift": _heat_map(found, "drift_log2", "drift (log2)", {"colorscale": "RdBu_r", "zmin": -top, "zmax": top}),
        "onset": _heat_map(
            found, "onset", f"out of band from ({found.run.unit})", {"colorscale": "Plasma", "colorbar_tickformat": "d"}
        ),
        "timelines": _timelines(found),
    }
    return {name: _html(metric) for name, metric in metrics.items() if metric is not None}


def _html(metric: Any) -> str:
    metric.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#a0a0a0", "activecolor": "#e9a23b"},
        font={"color": "#808080", "family": "system-ui, sans-serif"},
        margin={"l": 60, "r": 20, "t": 30, "b": 50},
    )
    metric.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID)
    metric.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID)
    # One button would upload the plot.
    config = {
        "displaylogo": False,
        "responsive": True,
        "modeBarButtonsToRemove": ["sendChartToCloud"],
        "plotlyServerURL": "",
    }
    html: str = metric.to_html(full_html=False, include_plotlyjs=False, config=config)
    return html


def _losses(found: Comparison) -> Any:
    runs = {"baseline": found.baseline, "run": found.run} | ({"reference": found.reference} if found.reference else {})
    if all(run.loss.final is None for run in runs.values()):
        return None
    metric = go.Figure()
    for name, run in runs.items():
        _draw_loss(metric, name, run)
    at = _first_onsets(found)
    if len(found.run.loss.steps) and len(at):
        losses = np.interp(at["onset"], found.run.loss.steps, _finite(found.run.loss.smooth))
        hover = [escape(f"{r['tensor']} of {r['layer']}, {r['metric']}", quote=False) for r in at.iter_rows(named=True)]
        marker = {"symbol": "triangle-down", "size": 11, "color": "#e9a23b", "line": {"width": 1, "color": "#808080"}}
        steps = at["onset"].to_list()
        metric.add_scatter(x=steps, y=losses, mode="markers", marker=marker, text=hover, name="a tensor leaves the band")
    if found.divergence_step is not None:
        metric.add_vline(found.divergence_step, line_dash="dot", line_color="#e63946", annotation_text="the loss diverges")
    metric.update_layout(height=380, xaxis_title=found.run.unit, yaxis_title="loss", legend_orientation="h", legend_y=1.12)
    return metric


def _draw_loss(metric: Any, name: str, run: Run) -> None:
    thin = slice(None, None, max(1, len(run.loss.steps) // _POINTS))
    steps, color = run.loss.steps[thin].tolist(), _COLORS[name]
    of_all = _finite(run.loss.losses[thin]).tolist()
    metric.add_scatter(
        x=steps, y=of_all, line={"color": color, "width": 1}, opacity=0.35, hoverinfo="skip", showlegend=False
    )
    metric.add_scatter(x=steps, y=_finite(run.loss.smooth[thin]).tolist(), line={"color": color, "width": 2.5}, name=name)


def _finite(values: Any) -> Any:
    return np.where(np.isfinite(values), values, np.nan)


def _first_onsets(found: Comparison) -> pl.DataFrame:
    """The first row of each tensor that left."""
    return found.out_of_band.unique(["layer", "role"], keep="first", maintain_order=True)


def _heat_map(found: Comparison, column: str, title: str, colors: dict[str, Any]) -> Any:
    """Layers of the model by what is in them; None where there is no value."""
    rows = placed(found.tensors).with_columns(what=pl.col("kind") + " " + pl.col("tensor"))
    if not rows[column].is_not_null().any():
        return None
    rows = rows.with_columns(block=pl.col("depth").cast(pl.String).fill_null("-")).sort("depth", nulls_last=True)
    blocks = rows["block"].unique(maintain_order=True).to_list()
    whats = sorted(rows["what"].unique())
    values = np.full((len(blocks), len(whats)), np.nan)
    names = np.full(values.shape, "", object)
    for row in rows.iter_rows(named=True):
        at = blocks.index(row["block"]), whats.index(row["what"])
        worst = np.fmin if column == "onset" else np.fmax  # of several with the same place, as of two towers
        values[at] = worst(values[at], np.nan if row[column] is None else row[column])
        names[at] = escape(f"{row['tensor']} of {row['layer']}", quote=False)
    hover = "%{text}<br>" + title + ": %{z}<extra></extra>"
    x, y = [escape(what, quote=False) for what in whats], [escape(block, quote=False) for block in blocks]
    heat = go.Heatmap(x=x, y=y, z=values, text=names, hovertemplate=hover, colorbar_title=title, **colors)
    metric = go.Figure(heat)
    metric.update_layout(height=max(300, min(1000, 160 + 22 * len(blocks))), yaxis_title="layer of the model")
    metric.update_yaxes(autorange="reversed", type="category")
    metric.update_xaxes(type="category", automargin=True)
    return metric


def _timelines(found: Comparison) -> Any:
    """Metrics of the worst tensors: what the baseline's band allows, and what the run did."""
    drawn = list(_worst(found))[:_DRAWN]
    if not drawn:
        return None
    titles = [escape(f"{tensor} of {layer}: {metric} ({_UNITS[metric]})", quote=False) for layer, _, tensor, metric in drawn]
    plot = make_subplots(rows=len(drawn), cols=1, subplot_titles=titles, vertical_spacing=0.28 / len(drawn))
    for i, (layer, role, _, metric) in enumerate(drawn, 1):
        lines = band(found.baseline.metrics, found.run.metrics, layer, role, metric)
        lines = lines.gather_every(max(1, len(lines) // _POINTS)).fill_nan(None)
        steps = lines["step"].to_list()
        for name, style in _LINES.items():
            values = lines[name].to_list()
            shown = {"name": _NAMES[name], "legendgroup": name, "showlegend": i == 1}
            plot.add_scatter(x=steps, y=values, row=i, col=1, **shown, **style)
    plot.update_layout(height=80 + 210 * len(drawn), legend_orientation="h", legend_y=1 + 0.25 / len(drawn))
    plot.update_xaxes(title_text=found.run.unit, row=len(drawn), col=1)
    plot.update_annotations(font_size=13, x=0, xanchor="left")
    return plot


_NAMES = {"expected": "baseline (running median)", "limit": "limit of its band", "found": "run"}
_LINES: dict[str, dict[str, Any]] = {
    "expected": {"line": {"color": _COLORS["baseline"], "width": 2}},
    "limit": {
        "line": {"color": _COLORS["baseline"], "width": 1, "dash": "dot"},
        "fill": "tonexty",
        "fillcolor": "rgba(42,157,143,0.18)",
    },
    "found": {"line": {"color": _COLORS["run"], "width": 2}},
}


def _worst(found: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """layer, role, tensor, metric: those that left, earliest first; then those that drifted by what they drifted most in."""
    first = _first_onsets(found)
    yield from first.select("layer", "role", "tensor", "metric").iter_rows()
    left = set(first.select("layer", "role").iter_rows())
    by = {"underflow_log2": "underflow_pct", "overflow_log2": "overflow_pct", "relative_error_log2": "relative_error"}
    for row in found.tensors.head(_DRAWN).iter_rows(named=True):
        known = [ratio for ratio in by if row[ratio] is not None]
        if (row["layer"], row["role"]) not in left and known:
            yield row["layer"], row["role"], row["tensor"], by[max(known, key=lambda ratio: row[ratio])]
