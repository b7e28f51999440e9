"""`nemo-fp8-debug compare RUN --baseline BASELINE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console

from ..analysis.comparison.compare import Comparison, compare
from ..analysis.diagnosis.diagnose import diagnose_comparison
from ..analysis.diagnosis.ranking import by_harm
from ..analysis.formatting import number
from ..analysis.runs.cluster import on_cluster
from ..analysis.runs.run import Run
from ..analysis.story.summary import summarize, to_json
from ..core.keys import SHOWN_AS, STATES
from ..core.table import load_modules
from ..errors import ConfigError
from ..numerics.metric_names import label_of
from .cluster import Cluster
from .console import console, print_json, say, working
from .listing import TENSOR, Column, print_rows

EXAMPLES = (
    "runs/fp8 --baseline runs/baseline",
    "runs/fp8 --baseline runs/baseline --reference runs/bf16",
    "runs/fp8 --baseline runs/baseline --json",
    "runs/fp8 --baseline runs/baseline --html report.html",
)


def command(
    run: Annotated[
        list[Path], typer.Argument(help="folder of the run to explain, or one above it; several: each by itself")
    ],
    baseline: Annotated[Path | None, typer.Option(metavar="BASELINE", help="a run that went well; required")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="RUN", help="a run that differs from RUN in one thing, such as BF16")
    ] = None,
    by: Annotated[str, typer.Option(metavar="step|samples", help="match the runs by step, or by samples consumed")] = "step",
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=REPLACEMENT", help="rename RUN's layers, REGEX=REPLACEMENT; may be repeated"),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="tensors to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="file for a report, which opens in any browser")] = None,
    cluster: Cluster = None,
) -> None:
    """Compare runs with a baseline: the losses, and the tensors in the order of harm, with how far each drifted."""
    if baseline is None:
        raise ConfigError("name the baseline with an option: compare RUN --baseline BASELINE")
    if html is not None:
        from ..tensorboard_plugin.page.report import check_report

        check_report(html)
    with on_cluster(cluster), working("reading the records", *(f"comparing {path}" for path in run)) as over:
        first, *others = _read([baseline, *run, *([reference] if reference else [])], by)
        over()
        other = others.pop() if reference else None
        comparisons = []
        for run_read in others:
            comparisons.append(compare(run_read, first, other, by, rename or ()))
            over()
        ranked = [by_harm(found.tensors.to_dicts(), diagnose_comparison(found)) for found in comparisons]
    if html is not None:  # before anything is printed: whoever reads that may stop reading
        from ..tensorboard_plugin.page.report import ReportSubject, write_report

        paths = [run.path for run in others]
        with working(f"writing {html}"):
            write_report(html, ReportSubject(first.path, paths, other.path if other else None, by, rename or ()))
    if as_json:
        plain = [told | {"tensors": tensors} for told, tensors in zip(map(to_json, comparisons), ranked, strict=True)]
        print_json(plain[0] if len(plain) == 1 else {"comparisons": plain})
    else:
        for found, tensors in zip(comparisons, ranked, strict=True):
            _print(found, tensors, top)


def _read(paths: list[Path], by: str) -> list[Run]:
    """All at once: most of it is work outside of Python. Samples of skipped steps are left out, as `diagnose` does."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: Run.read(path, by).without_skipped(), paths))


def _print(found: Comparison, tensors: Sequence[Mapping[str, Any]], top: int) -> None:
    """
    Args:
        tensors: rows of `found.tensors` in the order of harm.
    """
    out = console()
    _print_losses(out, found)
    _print_ranking(out, tensors[:top], found.run.unit)
    if len(found.out_of_band):
        _print_order(out, found, top)
        _print_groups(out, found)
    for module in load_modules("two_runs"):
        _print_feature(out, module, found.features[module.NAME].head(top))
    if len(tried := _tried_states(found)):
        _print_other_formats(out, tried, top)
    if len(found.differences()):
        _print_differences(out, found, top)
    for note in found.notes:
        say(out, note)
    say(out, summarize(found))


def _print_losses(out: Console, found: Comparison) -> None:
    unit = found.run.unit
    headings = (f"lowest ({unit})", "final", f"rises for good from {unit}", f"above the baseline from {unit}")
    rows = []
    for name, run in to_json(found)["runs"].items():
        lowest = "-" if run["lowest_loss"] is None else f"{run['lowest_loss'][1]:.4g} ({run['lowest_loss'][0]})"
        final = "-" if run["final_loss"] is None else f"{run['final_loss']:.4g}"
        since = [_count(run[key]) for key in ("diverged_at", "above_baseline_since")]
        rows.append((name, run["path"], lowest, final, *since))
    columns = (Column("run", "name"), Column("record", "text"), *map(Column, headings))
    print_rows(out, "Loss", columns, rows, entry=" ".join)


def _print_ranking(out: Console, tensors: Sequence[Mapping[str, Any]], unit: str) -> None:
    title = "Tensors by harm, as diagnose ranks them; baseline -> run, medians over the later half of the run"
    headings = ("drift (log2)", "MSE ratio", "underflow %", "overflow %", "amax", f"out of band from {unit}")
    rows = []
    for row in tensors:
        pairs = [_pair(row, metric) for metric in ("underflow_pct", "overflow_pct", "amax")]
        ratios = number(row["drift_log2"]), number(row["mse_ratio"])
        rows.append((row["layer"], row["tensor"], *ratios, *pairs, _count(row["onset"])))
    print_rows(out, title, (*TENSOR, *map(Column, headings)), rows)


def _print_order(out: Console, found: Comparison, top: int) -> None:
    unit = found.run.unit
    steps = (Column(f"from {unit}"), Column(f"{unit}s before the loss"))
    others = (Column("metric", "text"), *map(Column, ("expected", "found", "times the least that counts")))
    rows = []
    for row in found.out_of_band.head(top).iter_rows(named=True):
        values = [number(row[name]) for name in ("expected", "value", "excess")]
        when = str(row["onset"]), _count(row["lead"])
        rows.append((row["layer"], row["tensor"], *when, label_of(row["metric"]), *values))
    print_rows(out, "Order in which tensors leave the baseline's band", (*TENSOR, *steps, *others), rows)


def _print_groups(out: Console, found: Comparison) -> None:
    headings = ("tensors", "out of band", f"the first from {found.run.unit}", "median drift (log2)")
    rows = []
    for row in found.groups().iter_rows(named=True):
        counts = str(row["tensors"]), str(row["out_of_band"]), _count(row["onset"])
        rows.append((row["by"], row["group"], *counts, number(row["drift_log2"])))
    columns = (Column("by", "name"), Column("group", "name"), *map(Column, headings))
    print_rows(out, "Where they are", columns, rows, entry=" ".join)


def _print_feature(out: Console, module: ModuleType, rows: pl.DataFrame) -> None:
    """Print what a feature observed of both runs.

    Args:
        module: `two_runs` of the feature.
    """
    if len(rows):
        columns = (*TENSOR, *(Column(heading, "text") for heading in module.HEADINGS))
        cells = [(row["layer"], row["tensor"], *module.show_row(row)) for row in rows.iter_rows(named=True)]
        print_rows(out, module.TITLE, columns, cells)


def _tried_states(found: Comparison) -> pl.DataFrame:
    """What each format that was tried would do to what the run's optimizers keep, the worst weights first."""
    rows = found.what_if().filter(pl.col("role").is_in(list(STATES)))
    return rows.sort("relative_error", descending=True, nulls_last=True, maintain_order=True)


def _print_other_formats(out: Console, tried: pl.DataFrame, top: int) -> None:
    columns = (*TENSOR, Column("recipe", "text"), *map(Column, ("underflow %", "relative error")))
    rows = [
        (row["layer"], SHOWN_AS[row["role"]], row["recipe"], number(row["underflow_pct"]), number(row["relative_error"]))
        for row in tried.head(top).iter_rows(named=True)
    ]
    print_rows(out, "What other formats would do to what the run's optimizers keep", columns, rows)


def _print_differences(out: Console, found: Comparison, top: int) -> None:
    settings = found.differences().head(top).to_dicts()
    columns = (Column("setting", "name"), Column("baseline", "text"), Column("run", "text"))
    rows = [(row["setting"], *(row[name] or "-" for name in ("baseline", "run"))) for row in settings]
    styles = ["bold yellow" if row["telling"] else "" for row in settings]
    print_rows(out, "Differences of the runs", columns, rows, entry=" ".join, styles=styles)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _pair(row: Mapping[str, Any], metric: str) -> str:
    return f"{number(row[f'{metric}_baseline'])} -> {number(row[f'{metric}_run'])}"
