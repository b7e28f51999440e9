"""`nemo-fp8-debug compare BASELINE RUN`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..analysis.comparison.compare import COLUMNS, compare
from ..analysis.comparison.comparison import Comparison
from ..analysis.comparison.summary import summarize, to_json
from ..analysis.formatting import number
from ..analysis.runs.run import Run
from .console import console


def command(
    baseline: Annotated[Path, typer.Argument(help="folder of the baseline, or one above it")],
    run: Annotated[list[Path], typer.Argument(help="folder of the run to explain; several: each is compared with BASELINE")],
    reference: Annotated[Path | None, typer.Option(help="a run that differs from RUN in one thing, such as BF16")] = None,
    by: Annotated[str, typer.Option(help="match the runs by step, or by samples consumed")] = "step",
    rename: Annotated[list[str] | None, typer.Option(help="rename RUN's layers, REGEX=REPLACEMENT; may be repeated")] = None,
    top: Annotated[int, typer.Option(help="tensors to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")] = False,
    html: Annotated[Path | None, typer.Option(help="file for a page with plots")] = None,
) -> None:
    """Compare runs with a baseline: the losses, and the tensors ranked by how far they drifted."""
    if html is not None:
        from ..analysis.report import check_page

        check_page(html)
    first, *others = _read([baseline, *run, *([reference] if reference else [])], by)
    other = others.pop() if reference else None
    comparisons = [compare(first, run, other, by, rename or ()) for run in others]
    if as_json:
        plain = [to_json(found) for found in comparisons]
        print(json.dumps(plain[0] if len(plain) == 1 else {"comparisons": plain}, indent=2))
    else:
        for found in comparisons:
            _print(found, top)
    if html is not None:
        from ..analysis.report import write_page

        write_page(html, comparisons)


def _read(paths: list[Path], by: str) -> list[Run]:
    """All at once: most of it is work outside of Python."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: Run.read(path, by, COLUMNS), paths))


def _print(found: Comparison, top: int) -> None:
    out = console()
    out.print(_losses(found))
    out.print(_ranking(found, top))
    if len(found.out_of_band):
        out.print(_order(found, top))
        out.print(_where(found))
    if len(found.states):
        out.print(_states(found, top))
    if len(found.activations):
        out.print(_activations(found, top))
    if len(found.differences()):
        out.print(_differences(found, top))
    for note in found.notes:
        _say(out, note)
    _say(out, summarize(found))


def _say(out: Console, text: str) -> None:
    out.print(text, soft_wrap=True, highlight=False, markup=False)


def _table(title: str, *headings: str, texts: tuple[str, ...]) -> Table:
    """An empty table; columns are numbers, on the right, but for `texts`."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        if heading == "layer":
            table.add_column(heading, no_wrap=True)
        elif heading in texts:
            table.add_column(heading, min_width=min(6, len(heading)))
        else:
            table.add_column(heading, justify="right", overflow="fold")
    return table


def _losses(found: Comparison) -> Table:
    unit, losses = found.run.unit, Table(title="Loss", title_justify="left")
    for heading in ("run", "record", f"lowest ({unit})", "final", "rises for good from", "above the baseline from"):
        losses.add_column(heading)
    for name, run in to_json(found)["runs"].items():
        lowest = "-" if run["lowest_loss"] is None else f"{run['lowest_loss'][1]:.4g} ({run['lowest_loss'][0]})"
        final = "-" if run["final_loss"] is None else f"{run['final_loss']:.4g}"
        since = [("-" if run[key] is None else f"{unit} {run[key]}") for key in ("diverged_at", "above_baseline_since")]
        losses.add_row(name, escape(run["path"]), lowest, final, *since)
    return losses


def _ranking(found: Comparison, top: int) -> Table:
    title = "Tensors by drift, baseline -> run, medians over the later half of the run"
    metrics = ("drift (log2)", "MSE ratio", "underflow %", "overflow %", "amax")
    tensors = _table(title, "layer", "tensor", *metrics, f"out of band from {found.run.unit}", texts=("tensor",))
    for row in found.tensors.head(top).iter_rows(named=True):
        pairs = [_pair(row, metric) for metric in ("underflow_pct", "overflow_pct", "amax")]
        ratios = number(row["drift_log2"]), number(row["mse_ratio"])
        tensors.add_row(escape(row["layer"]), row["tensor"], *ratios, *pairs, _count(row["onset"]))
    return tensors


def _order(found: Comparison, top: int) -> Table:
    unit = found.run.unit
    headings = (f"from {unit}", f"{unit}s before the loss", "layer", "tensor", "metric", "expected", "found")
    title = "Order in which tensors leave the baseline's band"
    left = _table(title, *headings, "times the least that counts", texts=("tensor", "metric"))
    for row in found.out_of_band.head(top).iter_rows(named=True):
        values = [number(row[name]) for name in ("expected", "value", "excess")]
        name = escape(row["layer"]), row["tensor"], row["metric"]
        left.add_row(str(row["onset"]), _count(row["lead"]), *name, *values)
    return left


def _where(found: Comparison) -> Table:
    headings = ("by", "group", "tensors", "out of band", f"the first from {found.run.unit}", "median drift (log2)")
    where = _table("Where they are", *headings, texts=("by", "group"))
    for row in found.groups().iter_rows(named=True):
        counts = str(row["tensors"]), str(row["out_of_band"]), _count(row["onset"])
        where.add_row(row["by"], escape(row["group"]), *counts, number(row["drift_log2"]))
    return where


def _states(found: Comparison, top: int) -> Table:
    title = "What the optimizers keep, baseline -> run, medians over the later half of the run"
    headings = ("layer", "tensor", "size (log2 of the ratio)", "root mean square", f"NaN or infinity from {found.run.unit}")
    table = _table(title, *headings, texts=("tensor",))
    for row in found.states.head(top).iter_rows(named=True):
        sizes = f"{number(row['rms_baseline'])} -> {number(row['rms_run'])}"
        name = escape(row["layer"]), row["tensor"]
        table.add_row(*name, number(row["size_log2"]), sizes, _count(row["nonfinite_since"]))
    return table


def _activations(found: Comparison, top: int) -> Table:
    title = "What lies between GEMMs, baseline -> run, medians over the later half of the run"
    table = _table(title, "layer", "tensor", "metric", "baseline", "run", "log2 of the ratio", texts=("tensor", "metric"))
    for row in found.activations.head(top).iter_rows(named=True):
        values = (number(row[name]) for name in ("baseline", "run", "ratio_log2"))
        table.add_row(escape(row["layer"]), row["tensor"], row["metric"], *values)
    return table


def _differences(found: Comparison, top: int) -> Table:
    table = _table("Differences of the runs", "setting", "baseline", "run", texts=("setting", "baseline", "run"))
    for row in found.differences().head(top).iter_rows(named=True):
        style = "bold yellow" if row["telling"] else None
        table.add_row(escape(row["setting"]), *(escape(row[name] or "-") for name in ("baseline", "run")), style=style)
    return table


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _pair(row: dict[str, float | None], metric: str) -> str:
    return f"{number(row[f'{metric}_baseline'])} -> {number(row[f'{metric}_run'])}"
