"""`nemo-fp8-debug` compare, diagnose and recommend: what is wrong with a run, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console

from ..analysis.comparison.compare import Comparison, compare
from ..analysis.diagnosis.diagnose import diagnose, diagnose_comparison
from ..analysis.diagnosis.diagnosis import Diagnosis
from ..analysis.diagnosis.narrator import tell_advice, tell_verdict
from ..analysis.diagnosis.ranking import order_by_harm
from ..analysis.loss.outcome import MAX_GAP
from ..analysis.recommendation.options import Budget, Errors
from ..analysis.recommendation.recommend import Recommendation, TensorFix
from ..analysis.recommendation.snippets import PLAN, list_unwritten, make_snippets, write_snippets
from ..analysis.recommendation.snippets.snippet import Snippet
from ..analysis.runs.cluster import on_cluster
from ..analysis.runs.run import Run
from ..analysis.story.story import draw_strip, story
from ..analysis.story.summary import summarize, to_json, write_markdown
from ..core.keys import ROLES, SHOWN_AS, STATES, Key
from ..core.table import load_modules
from ..core.text import format_number
from ..errors import ConfigError
from ..numerics.metric_names import name_metric
from .console import AsJson, AsWholeJson, By, Cluster, Top, console, print_json, print_text, show_progress
from .listing import TENSOR, Column, print_rows

EXAMPLES = {
    "compare": (
        "runs/fp8 --baseline runs/baseline",
        "runs/fp8 --baseline runs/baseline --reference runs/bf16",
        "runs/fp8 --baseline runs/baseline --json",
        "runs/fp8 --baseline runs/baseline --html report.html",
    ),
    "diagnose": (
        "runs/fp8 --baseline runs/baseline",
        "runs/fp8 --baseline runs/baseline --reference runs/bf16",
        "runs/fp8 --baseline runs/good_a --baseline runs/good_b",
        "runs/fp8 --json",
        "runs/fp8 --baseline runs/baseline --markdown",
    ),
    "recommend": (
        "runs/fp8 --baseline runs/baseline",
        "runs/fp8 --operand decoder.layers.1.mlp.linear_fc2:X --output fix",
        "runs/fp8 --underflow 5 --json",
    ),
}


# --- compare --------------------------------------------------------------------------------------------------------------


def compare_command(
    run: Annotated[
        list[Path], typer.Argument(help="folder of the run to explain, or one above it; several: each by itself")
    ],
    baseline: Annotated[Path | None, typer.Option(metavar="BASELINE", help="a run that went well; required")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="RUN", help="a run that differs from RUN in one thing, such as BF16")
    ] = None,
    by: By = "step",
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=REPLACEMENT", help="rename RUN's layers, REGEX=REPLACEMENT; may be repeated"),
    ] = None,
    top: Top = 15,
    as_json: AsWholeJson = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="file for a report, which opens in any browser")] = None,
    cluster: Cluster = None,
) -> None:
    """Compare runs with a baseline: the losses, and the tensors in the order of harm, with how far each drifted."""
    if baseline is None:
        raise ConfigError("name the baseline with an option: compare RUN --baseline BASELINE")
    if html is not None:
        from ..tensorboard_plugin.page.report import check_report

        check_report(html)
    with on_cluster(cluster), show_progress("reading the records", *(f"comparing {path}" for path in run)) as over:
        first, *others = _read_runs([baseline, *run, *([reference] if reference else [])], by)
        over()
        other = others.pop() if reference else None
        comparisons = []
        for run_read in others:
            comparisons.append(compare(run_read, first, other, by, rename or ()))
            over()
        ranked = [order_by_harm(found.tensors.to_dicts(), diagnose_comparison(found)) for found in comparisons]
    if html is not None:  # before anything is printed: whoever reads that may stop reading
        from ..tensorboard_plugin.page.report import ReportSubject, write_report

        paths = [run.path for run in others]
        with show_progress(f"writing {html}"):
            write_report(html, ReportSubject(first.path, paths, other.path if other else None, by, rename or ()))
    if as_json:
        plain = [told | {"tensors": tensors} for told, tensors in zip(map(to_json, comparisons), ranked, strict=True)]
        print_json(plain[0] if len(plain) == 1 else {"comparisons": plain})
    else:
        for found, tensors in zip(comparisons, ranked, strict=True):
            _print_comparison(found, tensors, top)


def _read_runs(paths: list[Path], by: str) -> list[Run]:
    """All at once: most of it is work outside of Python. Samples of skipped steps are left out, as `diagnose` does."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: Run.read(path, by).without_skipped(), paths))


def _print_comparison(found: Comparison, tensors: Sequence[Mapping[str, Any]], top: int) -> None:
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
        print_text(out, note)
    print_text(out, summarize(found))


def _print_losses(out: Console, found: Comparison) -> None:
    unit = found.run.unit
    headings = (f"lowest ({unit})", "final", f"rises for good from {unit}", f"above the baseline from {unit}")
    rows = []
    for name, run in to_json(found)["runs"].items():
        lowest = "-" if run["lowest_loss"] is None else f"{run['lowest_loss'][1]:.4g} ({run['lowest_loss'][0]})"
        final = "-" if run["final_loss"] is None else f"{run['final_loss']:.4g}"
        since = [_show_step(run[key]) for key in ("diverged_at", "above_baseline_since")]
        rows.append((name, run["path"], lowest, final, *since))
    columns = (Column("run", "name"), Column("record", "text"), *map(Column, headings))
    print_rows(out, "Loss", columns, rows, entry=" ".join)


def _print_ranking(out: Console, tensors: Sequence[Mapping[str, Any]], unit: str) -> None:
    title = "Tensors by harm, as diagnose ranks them; baseline -> run, medians over the later half of the run"
    headings = ("drift (log2)", "MSE ratio", "underflow %", "overflow %", "amax", f"out of band from {unit}")
    rows = []
    for row in tensors:
        pairs = [_show_medians(row, metric) for metric in ("underflow_pct", "overflow_pct", "amax")]
        ratios = format_number(row["drift_log2"]), format_number(row["mse_ratio"])
        rows.append((row["layer"], row["tensor"], *ratios, *pairs, _show_step(row["onset"])))
    print_rows(out, title, (*TENSOR, *map(Column, headings)), rows)


def _print_order(out: Console, found: Comparison, top: int) -> None:
    unit = found.run.unit
    steps = (Column(f"from {unit}"), Column(f"{unit}s before the loss"))
    others = (Column("metric", "text"), *map(Column, ("expected", "found", "times the least that counts")))
    rows = []
    for row in found.out_of_band.head(top).iter_rows(named=True):
        values = [format_number(row[name]) for name in ("expected", "value", "excess")]
        when = str(row["onset"]), _show_step(row["lead"])
        rows.append((row["layer"], row["tensor"], *when, name_metric(row["metric"]), *values))
    print_rows(out, "Order in which tensors leave the baseline's band", (*TENSOR, *steps, *others), rows)


def _print_groups(out: Console, found: Comparison) -> None:
    headings = ("tensors", "out of band", f"the first from {found.run.unit}", "median drift (log2)")
    rows = []
    for row in found.groups().iter_rows(named=True):
        counts = str(row["tensors"]), str(row["out_of_band"]), _show_step(row["onset"])
        rows.append((row["by"], row["group"], *counts, format_number(row["drift_log2"])))
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
        (
            row["layer"],
            SHOWN_AS[row["role"]],
            row["recipe"],
            format_number(row["underflow_pct"]),
            format_number(row["relative_error"]),
        )
        for row in tried.head(top).iter_rows(named=True)
    ]
    print_rows(out, "What other formats would do to what the run's optimizers keep", columns, rows)


def _print_differences(out: Console, found: Comparison, top: int) -> None:
    settings = found.differences().head(top).to_dicts()
    columns = (Column("setting", "name"), Column("baseline", "text"), Column("run", "text"))
    rows = [(row["setting"], *(row[name] or "-" for name in ("baseline", "run"))) for row in settings]
    styles = ["bold yellow" if row["telling"] else "" for row in settings]
    print_rows(out, "Differences of the runs", columns, rows, entry=" ".join, styles=styles)


def _show_step(value: int | None) -> str:
    return "-" if value is None else str(value)


def _show_medians(row: Mapping[str, Any], metric: str) -> str:
    return f"{format_number(row[f'{metric}_baseline'])} -> {format_number(row[f'{metric}_run'])}"


# --- diagnose -------------------------------------------------------------------------------------------------------------

#: columns that the events take at most, and how many of them are listed
_WIDEST, _LISTED = 110, 15


def diagnose_command(
    run: Annotated[Path, typer.Argument(help="folder of the run to explain, or one above it")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            "--baseline",
            "--good",
            metavar="RUN",
            help="a run that went well; may be repeated for other seeds; without it RUN is judged by bands of healthy runs "
            "or by fixed limits",
        ),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="RUN", help="a run that differs from RUN only in precision")
    ] = None,
    by: By = "step",
    max_gap: Annotated[
        float,
        typer.Option(
            metavar="PERCENT", help="percent that the mean loss may lie above the baseline's before it counts as harm"
        ),
    ] = MAX_GAP,
    bands: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="bands of healthy runs (see learn), which a run without a baseline is judged by"),
    ] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown, for an issue")] = False,
    cluster: Cluster = None,
) -> None:
    """Say what is wrong with a run: the operand it began in, since when, why, and whether it did harm."""
    with on_cluster(cluster), show_progress(f"diagnosing {run}"):
        found = diagnose(run, baseline, reference, by, max_gap, bands)
        told = story(found) if as_json or as_markdown else {}
    if as_json:
        print_json(found.to_json() | {"story": told})
    elif as_markdown:
        against = f" against {', '.join(each.name for each in baseline)}" if baseline else ""
        print(f"### {run.name}{against}: {told['headline']['title']}\n\n{write_markdown(told)}")
    else:
        _print_diagnosis(found)


def _print_diagnosis(found: Diagnosis) -> None:
    out = console()
    print_text(out, found.verdict())
    for note in (*found.details, *found.notes):
        print_text(out, f"note: {note}")
    _print_events(out, story(found)["events"], found.run.unit)
    out.print()
    columns = (
        *(Column("rule", "name"), Column("about", "name"), Column(f"since {found.run.unit}")),
        *(Column(heading, "text") for heading in ("cause", "strength", "evidence")),
    )
    rows = [
        (f.rule, f.operand or "the run", "-" if f.since is None else str(f.since), f.cause, f.strength, f.evidence)
        for f in found.findings
    ]
    print_rows(out, "What the rules found, which the verdict rests on", columns, rows, entry=": ".join)


def _print_events(out: Console, events: Sequence[Mapping[str, Any]], unit: str) -> None:
    """On one axis of steps, and as a list."""
    if len(events) < 2:
        return
    out.print()
    print_text(out, "Order of events:")
    for line in draw_strip(events, min(out.width, _WIDEST) - 2, unit).splitlines():
        out.print(f"  {line}", markup=False, highlight=False, no_wrap=True, overflow="ignore")
    for event in events[:_LISTED]:
        print_text(out, f"  {unit} {event['step']}: {event['what']}")
    if (left := len(events) - _LISTED) > 0:
        print_text(out, f"  and {left} more, all with --json")


# --- recommend ------------------------------------------------------------------------------------------------------------

_DEFAULT = Budget()


def recommend_command(
    run: Annotated[Path, typer.Argument(help="folder of the run to fix, or one above it")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            "--baseline",
            "--good",
            metavar="RUN",
            help="a run that went well: looks only at operands that left its band; may be repeated for other seeds",
        ),
    ] = None,
    operand: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER:ROLE", help="look at this one: LAYER:X, LAYER:W or LAYER:dY; may be repeated"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for the plan and the files of each framework")
    ] = None,
    relative_error: Annotated[
        float, typer.Option(metavar="LIMIT", help="most relative error of an operand")
    ] = _DEFAULT.relative_error,
    underflow: Annotated[
        float, typer.Option(metavar="PERCENT", help="most percent that become zero")
    ] = _DEFAULT.underflow_pct,
    overflow: Annotated[
        float, typer.Option(metavar="PERCENT", help="most percent that are clipped")
    ] = _DEFAULT.overflow_pct,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every option that was tried")] = False,
    cluster: Cluster = None,
) -> None:
    """Find the cheapest change for each operand that loses too much, and write the files that make it.

    Without --baseline and --operand it looks at all operands that exceed the limits. It begins with the verdict of
    `diagnose`, whose advice is the change of the blamed operand.
    """
    budget = Budget(relative_error, underflow, overflow)
    with on_cluster(cluster), show_progress(f"diagnosing {run}", "trying changes") as over:
        diagnosis = diagnose(run, baseline)
        over()
        found = diagnosis.recommend(budget, [_parse_operand(text) for text in operand or ()])
    advice = [] if operand else tell_advice(diagnosis, diagnosis.find_fix(found))
    output = output if found.plan.changes else None
    snippets = write_snippets(found, output) if output else make_snippets(found)
    if as_json:
        print_json(found.to_json() | {"advice": advice})
        return
    if not operand:
        print_text(console(), tell_verdict(diagnosis, advice))
    _print_recommendation(console(), found, snippets, output)


def _parse_operand(text: str) -> Key:
    layer, _, role = text.rpartition(":")
    roles = {SHOWN_AS[role]: role for role in ROLES} | {role: role for role in ROLES}
    if not layer or role not in roles:
        raise ConfigError(f"--operand {text!r} is not an operand; write LAYER:ROLE, the role X, W or dY")
    return layer, roles[role]


def _print_recommendation(out: Console, found: Recommendation, snippets: list[Snippet], folder: Path | None) -> None:
    if not found.findings and not found.notes:
        print_text(out, "No recipe is to blame: there is nothing to change, and nothing was written.")
        return
    if found.findings:
        _print_fixes(out, found)
    for line in _tell_recommendation(found, snippets, folder):
        print_text(out, line)


def _tell_recommendation(found: Recommendation, snippets: list[Snippet], folder: Path | None) -> Iterator[str]:
    """What there is to say below the table."""
    if found.before is not None and found.after is not None:
        of_what = "" if found.in_use else ", if all that was measured were quantized"
        yield f"FP8 coverage, share of the GEMMs' FLOPs{of_what}: {_show_share(found.before)} -> {_show_share(found.after)}."
    if found.ends:
        kept = "" if found.ends.coverage is None else f"; coverage would be {_show_share(found.ends.coverage)}"
        ends = f"the first {found.ends.start} and last {found.ends.end} blocks in BF16"
        yield f"What leaves FP8 lies at the ends of the model: {ends} would do as well{kept}."
    yield from found.notes
    for snippet in snippets:
        yield f"{snippet.about}: {snippet.name if folder is None else folder / snippet.name}"
        yield from (f"  {sentence}" for sentence in snippet.coarser)
    yield from list_unwritten(found)
    if not found.plan.changes:
        yield "There is nothing to change, and nothing was written."
    elif folder is None:
        yield "Nothing was written; --output FOLDER writes the plan and these files."
    else:
        yield f"the plan: {folder / PLAN}"


def _print_fixes(out: Console, found: Recommendation) -> None:
    limits = found.budget
    bounds = (
        f"relative error {limits.relative_error:g}, underflow {limits.underflow_pct:g}%, overflow {limits.overflow_pct:g}%"
    )
    columns = (
        *(*TENSOR, Column("why", "text"), Column("in use" if found.in_use else "measured under", "text")),
        *(Column("change", "text"), *map(Column, ("relative error", "underflow %", "overflow %", "coverage cost"))),
    )
    rows = []
    for finding in found.findings:
        stay, chosen = finding.options[0], finding.chosen
        metrics = [_show_change(finding, stay.errors, chosen.errors, name) for name in Errors.__annotations__]
        cost = "-" if finding.cost is None else _show_share(finding.cost)
        rows.append((finding.layer, SHOWN_AS[finding.role], finding.why, stay.recipe, finding.change, *metrics, cost))
    print_rows(out, f"Cheapest changes that keep to {bounds}, worst samples", columns, rows)


def _show_change(finding: TensorFix, now: Errors | None, then: Errors | None, name: str) -> str:
    shown = [format_number(getattr(errors, name) if errors else None) for errors in (now, then)]
    about = "about " if finding.chosen.approximate and then is not None else ""
    return f"{shown[0]} -> {about}{shown[1]}" if finding.changes else shown[0]


def _show_share(share: float) -> str:
    return f"{100 * share:.3g}%"
