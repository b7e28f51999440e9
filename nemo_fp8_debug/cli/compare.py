"""`nemo-fp8-debug compare GOOD BAD`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..analysis.compare import Comparison, compare, number
from .console import console


def command(
    good: Annotated[Path, typer.Argument(help="folder of the good run, or one above it")],
    bad: Annotated[Path, typer.Argument(help="folder of the run to explain")],
    twin: Annotated[Path | None, typer.Option(help="a run that differs from BAD in one thing, as BF16 for FP8")] = None,
    top: Annotated[int, typer.Option(help="tensors to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")] = False,
) -> None:
    """Tell a good run from a bad one: loss, and the tensors ranked by how far they drifted apart."""
    found = compare(good, bad, twin)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _print(found, top)


def _print(found: Comparison, top: int) -> None:
    out = console()
    losses = Table(title="Loss", title_justify="left")
    for heading in ("run", "record", "lowest (step)", "final", "rises for good from", "above the good run from"):
        losses.add_column(heading)
    for name, run in found.to_json()["runs"].items():
        lowest = "-" if run["lowest_loss"] is None else f"{run['lowest_loss'][1]:.4g} ({run['lowest_loss'][0]})"
        final = "-" if run["final_loss"] is None else f"{run['final_loss']:.4g}"
        since = [("-" if run[key] is None else f"step {run[key]}") for key in ("diverged_at", "above_good_since")]
        losses.add_row(name, escape(run["path"]), lowest, final, *since)
    out.print(losses)

    tensors = Table(title="Tensors by drift, good -> bad, medians over the later half of the run", title_justify="left")
    tensors.add_column("layer", no_wrap=True)
    tensors.add_column("tensor", min_width=6)
    for heading in ("drift (log2)", "MSE ratio", "underflow %", "overflow %", "amax"):
        tensors.add_column(heading, justify="right", overflow="fold")
    for row in found.tensors.head(top).iter_rows(named=True):
        pairs = [_pair(row, figure) for figure in ("underflow_pct", "overflow_pct", "amax")]
        tensors.add_row(escape(row["layer"]), row["tensor"], number(row["drift_log2"]), number(row["mse_ratio"]), *pairs)
    out.print(tensors)
    if len(found.left):
        left = Table(title="Order in which tensors leave the good run's band", title_justify="left")
        for heading in ("from step", "layer", "tensor", "figure", "expected", "found", "times the least that counts"):
            left.add_column(heading, justify="right" if heading not in ("layer", "tensor", "figure") else "left")
        for row in found.left.head(top).iter_rows(named=True):
            values = [number(row[name]) for name in ("expected", "value", "excess")]
            left.add_row(str(row["onset"]), escape(row["layer"]), row["tensor"], row["figure"], *values)
        out.print(left)
    out.print(found.verdict(), soft_wrap=True, highlight=False, markup=False)


def _pair(row: dict[str, float | None], figure: str) -> str:
    return f"{number(row[f'{figure}_good'])} -> {number(row[f'{figure}_bad'])}"
