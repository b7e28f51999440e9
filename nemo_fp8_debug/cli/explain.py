"""`nemo-fp8-debug` compare, diagnose and recommend: what is wrong with a run, and what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from types import ModuleType
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console
from rich.text import Text

from ..analysis.comparison.compare import Comparison, compare
from ..analysis.comparison.drift import describe_common_property
from ..analysis.diagnosis.diagnose import diagnose, diagnose_comparison
from ..analysis.diagnosis.diagnosis import Diagnosis
from ..analysis.diagnosis.narrator import (
    describe_band_exit,
    describe_step_distance,
    tell_advice,
    tell_conclusion,
    tell_next_step,
    tell_possible_misses,
)
from ..analysis.diagnosis.ranking import sort_rows_by_harm
from ..analysis.loss.outcome import MAX_GAP
from ..analysis.recommendation.options import Budget, WorstErrors
from ..analysis.recommendation.recommend import Recommendation, TensorFix
from ..analysis.recommendation.snippets import PLAN, explain_missing_snippets, make_snippets, write_snippets
from ..analysis.recommendation.snippets.snippet import Snippet
from ..analysis.runs.cluster import on_cluster
from ..analysis.runs.run import Run
from ..analysis.story.story import draw_event_strip, story
from ..analysis.story.summary import serialize_comparison, tell_drifted_tensors, write_markdown
from ..analysis.story.summary import tell_conclusion as tell_comparison
from ..core.keys import ROLES, SHOWN_AS, STATES, Key
from ..core.table import load_feature_modules
from ..core.text import ABSENT, ARROW, ELLIPSIS, TENSOR, TableColumn, format_count, format_number
from ..errors import ConfigError
from .console import (
    AsJson,
    AsWholeJson,
    By,
    Cluster,
    Top,
    make_console,
    print_json,
    print_next_step,
    print_notes,
    print_table,
    print_text,
    repeat_option,
    show_progress,
)

Reference = Annotated[
    str | None, typer.Option(metavar="REFERENCE", help="the same run in BF16: tells whether precision is the cause")
]
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
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="folder or address of a run, or a folder above it")],
    baseline: Annotated[
        str | None, typer.Option(metavar="BASELINE", help="a good run to compare with; required", show_default=False)
    ] = None,
    reference: Reference = None,
    by: By = "step",
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=NAME", help="rename layers of RUN so that they match the baseline's; may be repeated"),
    ] = None,
    top: Top = 6,
    everything: Annotated[bool, typer.Option("--all", help="print every table, note and row")] = False,
    as_json: AsWholeJson = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="also write a report that opens in any browser")] = None,
    cluster: Cluster = None,
) -> None:
    """Compare runs with a good run: their losses, and the tensors that drifted farthest."""
    if baseline is None:
        raise ConfigError("--baseline is missing; name a good run: compare RUN --baseline BASELINE")
    if html is not None:
        from ..tensorboard_plugin.page.report import check_report_path

        check_report_path(html)
    with on_cluster(cluster), show_progress("reading the records", *(f"comparing {path}" for path in run)) as over:
        first, *others = _read_runs([baseline, *run, *([reference] if reference else [])], by)
        over()
        other = others.pop() if reference else None
        comparisons = []
        for run_read in others:
            comparisons.append(compare(run_read, first, other, by, rename or ()))
            over()
        ranked = [sort_rows_by_harm(found.tensors.to_dicts(), diagnose_comparison(found)) for found in comparisons]
    if html is not None:  # before we print, because a reader of the output may end this process
        from ..tensorboard_plugin.page.report import ReportRecords, write_report

        paths = [run.path for run in others]
        with show_progress(f"writing {html}"):
            write_report(html, ReportRecords(first.path, paths, other.path if other else None, by, rename or ()))
    if as_json:
        plain = [
            told | {"tensors": tensors} for told, tensors in zip(map(serialize_comparison, comparisons), ranked, strict=True)
        ]
        print_json(plain[0] if len(plain) == 1 else {"comparisons": plain})
    else:
        for found, tensors in zip(comparisons, ranked, strict=True):
            _print_comparison(found, tensors, None if everything else top)
        also = _repeat_reference(reference)
        harmed = [path for path, each in zip(run, comparisons, strict=True) if each.loss.harm in ("harmful", "likely")]
        print_next_step(make_console(), command=["diagnose", str([*harmed, *run][0]), "--baseline", str(baseline), *also])


def _read_runs(paths: list[str], by: str) -> list[Run]:
    """Read several runs in parallel. Leave out samples of skipped steps, as `diagnose` does."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda path: Run.read(path, by).drop_skipped_steps(), paths))


def _print_comparison(found: Comparison, tensors: Sequence[Mapping[str, Any]], top: int | None) -> None:
    """
    Args:
        tensors: rows of `found.tensors` in the order of harm.
        top: largest number of rows in each table, or None to print everything.
    """
    out = make_console()
    print_text(out, tell_comparison(found))
    _print_losses(out, found)
    _print_ranking(out, tensors[:top], found.run.unit)
    order = found.out_of_band if top is None else found.out_of_band.head(top)
    _print_order(out, order, found.run.unit)
    for module in load_feature_modules("two_runs"):
        rows = found.feature_comparisons[module.NAME]
        _print_feature(out, module, rows if top is None else rows.head(top))
    settings = found.differences().to_dicts()
    told = [row for row in settings if row["telling"]][:top] if top is not None else settings
    _print_differences(out, told)
    left = {"tensor": len(tensors) - len(tensors[:top]), "row of the order": len(found.out_of_band) - len(order)}
    left |= {"setting that differs": len(settings) - len(told)}
    if top is None:
        _print_groups(out, found)
        _print_other_formats(out, _tried_states(found))
    sentences = tell_drifted_tensors(found) if top is None else describe_common_property(found.tensors)
    if sentences:
        out.print()
        print_text(out, " ".join(sentences))
    width = 2 * out.width - len("note: ")
    print_notes(out, [note if top is None else textwrap.shorten(note, width, placeholder=ELLIPSIS) for note in found.notes])
    if top is not None:
        plural = {"setting that differs": "settings that differ", "row of the order": "rows of the order"}
        counts = [format_count(n, what, plural.get(what)) for what, n in left.items() if n]
        out.print()
        print_text(out, f"Left out: {', '.join([*counts, 'groups'])}. --all prints them.")


def _print_losses(out: Console, found: Comparison) -> None:
    unit = found.run.unit
    columns = (
        *(
            TableColumn("run", "text"),
            TableColumn("lowest loss"),
            TableColumn(f"at {unit}", rank=2),
            TableColumn("final loss"),
        ),
        *(TableColumn("above baseline since"), TableColumn("rises since"), TableColumn("record", "name", rank=1)),
    )
    rows = []
    for name, run in serialize_comparison(found)["runs"].items():
        at, lowest = run["lowest_loss"] or (None, None)
        losses = format_number(lowest, digits=4), _show_step(at), format_number(run["final_loss"], digits=4)
        since = [_show_step(run[key]) for key in ("above_baseline_since", "diverged_at")]
        rows.append((name, *losses, *since, run["path"]))
    print_table(out, "Losses", columns, rows)


def _print_ranking(out: Console, tensors: Sequence[Mapping[str, Any]], unit: str) -> None:
    columns = (
        *(*TENSOR, TableColumn(f"since {unit}"), TableColumn("underflow %", rank=1), TableColumn("amax", rank=2)),
        *(TableColumn("MSE ratio", rank=3), TableColumn("drift (log2)", rank=4), TableColumn("overflow %", rank=5)),
    )
    rows = []
    for row in tensors:
        under, over, amax = (_show_medians(row, metric) for metric in ("underflow_pct", "overflow_pct", "amax"))
        ratios = format_number(row["mse_ratio"]), format_number(row["drift_log2"])
        rows.append((row["tensor"], row["layer"], _show_step(row["onset"]), under, amax, *ratios, over))
    print_table(out, f"Tensors by harm; baseline {ARROW} run are medians of the later half", columns, rows)


def _print_order(out: Console, order: pl.DataFrame, unit: str) -> None:
    columns = (
        *(TableColumn(f"since {unit}"), *TENSOR, TableColumn(f"baseline {ARROW} run", "text", least=40)),
        *(TableColumn("times threshold", rank=1), TableColumn("next to the loss", "text", rank=2)),
    )
    rows = []
    for row in order.iter_rows(named=True):
        when = ABSENT if row["lead"] is None else describe_step_distance(-row["lead"], 0, unit)
        about = str(row["onset"]), row["tensor"], row["layer"]
        rows.append((*about, describe_band_exit(row), format_number(row["excess"]), when))
    print_table(out, "Order in which tensors left the baseline's band", columns, rows)


def _print_groups(out: Console, found: Comparison) -> None:
    if found.out_of_band.is_empty():
        return
    columns = (
        *(TableColumn("by", "text"), TableColumn("group", "text"), TableColumn("tensors"), TableColumn("out of band")),
        *(TableColumn(f"first from {found.run.unit}"), TableColumn("median drift (log2)", rank=1)),
    )
    rows = []
    for row in found.count_out_of_band_groups().iter_rows(named=True):
        counts = f"{row['tensors']:,}", f"{row['out_of_band']:,}", _show_step(row["onset"])
        rows.append((row["by"], row["group"], *counts, format_number(row["drift_log2"])))
    print_table(out, "Groups of tensors", columns, rows)


def _print_feature(out: Console, module: ModuleType, rows: pl.DataFrame) -> None:
    """Print a feature's table of both runs.

    Args:
        module: the feature's module `two_runs`.
    """
    columns = (*TENSOR, *(TableColumn(heading, "text", rank=i) for i, heading in enumerate(module.HEADINGS)))
    cells = [(row["tensor"], row["layer"], *module.format_comparison_cells(row)) for row in rows.iter_rows(named=True)]
    print_table(out, module.TITLE, columns, cells)


def _tried_states(found: Comparison) -> pl.DataFrame:
    """Return the errors of the optimizers' tensors under each format that was tried, worst first."""
    rows = found.list_what_if_metrics().filter(pl.col("role").is_in(list(STATES)))
    return rows.sort("relative_error", descending=True, nulls_last=True, maintain_order=True)


def _print_other_formats(out: Console, tried: pl.DataFrame) -> None:
    columns = (*TENSOR, TableColumn("recipe", "text"), *map(TableColumn, ("underflow %", "relative error")))
    rows = []
    for row in tried.iter_rows(named=True):
        metrics = [format_number(row[metric]) for metric in ("underflow_pct", "relative_error")]
        rows.append((SHOWN_AS[row["role"]], row["layer"], row["recipe"], *metrics))
    print_table(out, "Optimizer states under other formats", columns, rows)


def _print_differences(out: Console, settings: Sequence[Mapping[str, Any]]) -> None:
    columns = (TableColumn("setting", "name"), TableColumn("baseline", "text"), TableColumn("run", "text"))
    rows = [(row["setting"], *(row[name] or ABSENT for name in ("baseline", "run"))) for row in settings]
    styles = ["bold yellow" if row["telling"] else "" for row in settings]
    print_table(out, "Settings that differ", columns, rows, styles)


def _show_step(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _show_medians(row: Mapping[str, Any], metric: str) -> str:
    return f"{format_number(row[f'{metric}_baseline'])} {ARROW} {format_number(row[f'{metric}_run'])}"


# --- diagnose -------------------------------------------------------------------------------------------------------------

#: largest width of the events in columns, and largest numbers of events and of findings in the lists
_WIDEST, _EVENTS, _FINDINGS = 110, 10, 8


def diagnose_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder or address of the run to explain, or a folder above it")],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "--good",
            metavar="BASELINE",
            help="a good run to compare with; repeat it for other seeds. Without it, RUN is judged by the bands of healthy "
            "runs and by fixed thresholds",
        ),
    ] = None,
    reference: Reference = None,
    by: By = "step",
    max_gap: Annotated[
        float,
        typer.Option(metavar="PERCENT", help="smallest loss gap over the baseline that counts as harm, e.g. 2"),
    ] = MAX_GAP,
    bands: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="bands of your healthy runs, written by `learn`; used if there is no baseline"),
    ] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown, for an issue")] = False,
    cluster: Cluster = None,
) -> None:
    """Report which tensor or setting went wrong first, when, why, whether it hurt the loss, and what to change."""
    with on_cluster(cluster), show_progress(f"diagnosing {run}"):
        found = diagnose(run, baseline, reference, by, max_gap, bands)
        told = story(found) if as_json or as_markdown else {}
    if as_json:
        print_json(found.to_json() | {"story": told})
    elif as_markdown:
        against = f" against {', '.join(PurePath(each).name for each in baseline)}" if baseline else ""
        print(f"### {PurePath(run).name}{against}: {told['headline']['title']}\n\n{write_markdown(told)}")
    else:
        _print_diagnosis(found)
        _print_advice(found, run, baseline, reference)


def _repeat_reference(reference: str | None) -> list[str]:
    return repeat_option("--reference", [reference] if reference else None)


def _print_advice(found: Diagnosis, run: str, baselines: Sequence[str] | None, reference: str | None) -> None:
    """Print the advice and the command that writes its plan. Without advice, print the command that accepts or shows the
    run.
    """
    runs = [str(run), *repeat_option("--baseline", baselines)]
    if advice := " ".join(tell_next_step(found, found.advice)):
        has_plan = found.fix is not None and found.fix.changes_cast
        recommended = ["recommend", *runs, *_repeat_reference(reference), "--output", "fix"]
        print_next_step(make_console(), advice, recommended if has_plan else [])
    else:
        print_next_step(make_console(), command=["gate", *runs, "--max-gap", "0.5%"] if baselines else ["view", str(run)])


def _print_diagnosis(found: Diagnosis) -> None:
    out = make_console()
    print_text(out, tell_conclusion(found))
    _print_events(out, story(found)["events"], found.run.unit)
    columns = (
        *(TableColumn(f"since {found.run.unit}"), *TENSOR, TableColumn("evidence", "text", least=36)),
        *(
            TableColumn("strength", "text", rank=1),
            TableColumn("rule", "text", rank=2),
            TableColumn("cause", "text", rank=3),
        ),
    )
    rows = [
        (
            *(_show_step(each.since), SHOWN_AS[each.role] if each.role else "", each.layer or "the run"),
            *(each.evidence, each.strength, each.rule, each.cause),
        )
        for each in found.findings
    ]
    print_table(out, "Findings that the verdict rests on", columns, rows[:_FINDINGS])
    if (left := len(rows) - _FINDINGS) > 0:
        print_text(out, f"and {left} more; --json prints them")
    print_notes(out, [*tell_possible_misses(found), *found.culprit_details, *found.notes])


def _print_events(out: Console, events: Sequence[Mapping[str, Any]], unit: str) -> None:
    """Print events on one axis of steps, and as a list."""
    if len(events) < 2:
        return
    out.print()
    print_text(out, "Order of events", "bold")
    for line in draw_event_strip(events, min(out.width, _WIDEST), unit).splitlines():
        out.print(Text(line), no_wrap=True, overflow="ignore", crop=False)
    rows = []
    for event in events[:_EVENTS]:
        tensor, layer = SHOWN_AS.get(event["role"], ""), event["layer"] or ""
        what = event["what"].removeprefix(f"{tensor} of {layer}: ").replace(f"{tensor} of {layer}", "the tensor")
        rows.append((str(event["step"]), tensor, layer, what))
    print_table(out, "Events", (TableColumn(unit), *TENSOR, TableColumn("what happened", "text", least=36)), rows)
    if (left := len(events) - _EVENTS) > 0:
        print_text(out, f"and {left} more; --json prints them")


# --- recommend ------------------------------------------------------------------------------------------------------------

_DEFAULT = Budget()


def recommend_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder or address of the run to fix, or a folder above it")],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "--good",
            metavar="BASELINE",
            help="a good run: we check only operands that left its band; repeat it for other seeds",
        ),
    ] = None,
    reference: Reference = None,
    operand: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER:ROLE", help="check this operand: LAYER:X, LAYER:W or LAYER:dY; may be repeated"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for the plan and the files of your framework")
    ] = None,
    relative_error: Annotated[
        float, typer.Option(metavar="LIMIT", help="maximum relative error of an operand, 0 to 1")
    ] = _DEFAULT.relative_error,
    underflow: Annotated[
        float, typer.Option(metavar="PERCENT", help="maximum percentage of values that become zero")
    ] = _DEFAULT.underflow_pct,
    overflow: Annotated[
        float, typer.Option(metavar="PERCENT", help="maximum percentage of values that are clipped")
    ] = _DEFAULT.overflow_pct,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every option that was tried")] = False,
    cluster: Cluster = None,
) -> None:
    """Find the cheapest change for each operand that loses too much, and write files that apply the changes.

    Without --baseline and --operand, we check all operands over the limits. The verdict of `diagnose` is printed first.
    """
    budget = Budget(relative_error, underflow, overflow)
    with on_cluster(cluster), show_progress(f"diagnosing {run}", "trying changes") as over:
        diagnosis = diagnose(run, baseline, reference)
        over()
        found = diagnosis.recommend(budget, [_parse_operand(text) for text in operand or ()])
    advice = [] if operand else tell_advice(diagnosis, diagnosis.find_fix_of_blamed_tensor(found))
    output = output if found.plan.changes else None
    snippets = write_snippets(found, output) if output else make_snippets(found)
    if as_json:
        print_json(found.to_json() | {"advice": advice})
        return
    out = make_console()
    print_text(out, " ".join([*([] if operand else [tell_conclusion(diagnosis)]), _tell_changes(found, output)]))
    _print_recommendation(out, found, snippets, output)
    # If there is a plan, leave out advice on other things, such as a missing baseline.
    is_about_plan = not found.plan.changes or diagnosis.find_fix_of_blamed_tensor(found) is not None
    told = " ".join(tell_next_step(diagnosis, advice)) if is_about_plan else ""
    runs = [str(run), *repeat_option("--baseline", baseline), *_repeat_reference(reference)]
    if output:
        print_next_step(out, told, ["rescue", str(output / PLAN), "--", "COMMAND"])
    elif found.plan.changes:
        again = [*runs, *repeat_option("--operand", operand), *_repeat_limits(budget), "--output", "fix"]
        print_next_step(out, told, ["recommend", *again])
    else:
        print_next_step(out, told, [] if told else ["diagnose", *runs])


def _repeat_limits(budget: Budget) -> list[str]:
    """Return the options for the limits that are not the default."""
    options = {"--relative-error": "relative_error", "--underflow": "underflow_pct", "--overflow": "overflow_pct"}
    changed = {o: getattr(budget, name) for o, name in options.items() if getattr(budget, name) != getattr(_DEFAULT, name)}
    return [word for option, value in changed.items() for word in (option, f"{value:g}")]


def _parse_operand(text: str) -> Key:
    layer, _, role = text.rpartition(":")
    roles = {SHOWN_AS[role]: role for role in ROLES} | {role: role for role in ROLES}
    if not layer or role not in roles:
        raise ConfigError(f"--operand {text!r} is not an operand; write LAYER:ROLE, such as fc1:dY")
    return layer, roles[role]


def _tell_changes(found: Recommendation, folder: Path | None) -> str:
    """Return a sentence: how many operands another cast helps, and whether the plan was written."""
    n = sum(finding.changes_cast for finding in found.findings)
    if not found.findings and not found.notes:
        return "No recipe is to blame: there is nothing to change, and nothing was written."
    if not found.plan.changes:
        return "There is nothing to change, and nothing was written."
    what = f"Another cast helps {n} of {format_count(len(found.findings), 'operand')}"
    return f"{what}; nothing was written yet." if folder is None else f"{what}; the plan is {folder / PLAN}."


def _print_recommendation(out: Console, found: Recommendation, snippets: list[Snippet], folder: Path | None) -> None:
    _print_fixes(out, found)
    files = [(str(snippet.name if folder is None else folder / snippet.name), snippet.about) for snippet in snippets]
    title = "Files that --output writes" if folder is None else "Files"
    print_table(out, title, (TableColumn("file", "name"), TableColumn("for", "text")), files)
    print_notes(out, list(_tell_recommendation(found, snippets)))


def _tell_recommendation(found: Recommendation, snippets: list[Snippet]) -> Iterator[str]:
    """Yield the notes to print below the tables."""
    if found.before is not None and found.after is not None:
        of_what = "" if found.is_run_quantized else ", assuming that all measured GEMMs are quantized"
        shares = f"{_show_share(found.before)} {ARROW} {_show_share(found.after)}"
        yield f"FP8 coverage, share of the GEMMs' FLOPs{of_what}: {shares}."
    if found.ends:
        kept = "" if found.ends.coverage is None else f" Coverage would be {_show_share(found.ends.coverage)}."
        ends = f"the first {found.ends.start} and last {found.ends.end} blocks in BF16"
        yield f"Everything that leaves FP8 is at the ends of the model, so you can keep {ends} instead.{kept}"
    yield from found.notes
    for snippet in snippets:
        yield from (f"{snippet.name}: {sentence}" for sentence in snippet.coarser)
    yield from explain_missing_snippets(found)


def _print_fixes(out: Console, found: Recommendation) -> None:
    limits = found.budget
    bounds = (
        f"relative error {format_number(limits.relative_error)}, underflow {format_number(limits.underflow_pct, '%')}, "
        f"overflow {format_number(limits.overflow_pct, '%')}"
    )
    columns = (
        *(
            *TENSOR,
            TableColumn("change", "text", least=14),
            TableColumn("why", "text", rank=1),
            TableColumn("relative error", rank=2),
        ),
        *(TableColumn("underflow %", rank=3), TableColumn("overflow %", rank=5), TableColumn("coverage cost", rank=4)),
        TableColumn("in use" if found.is_run_quantized else "measured under", "text", rank=6),
    )
    rows = []
    for finding in found.findings:
        stay, chosen = finding.options[0], finding.chosen_option
        metrics = [_show_change(finding, stay.errors, chosen.errors, name) for name in WorstErrors.__annotations__]
        cost = ABSENT if finding.cost is None else _show_share(finding.cost)
        about = SHOWN_AS[finding.role], finding.layer, finding.change_description, finding.why
        rows.append((*about, *metrics, cost, stay.recipe))
    print_table(out, f"Cheapest changes within {bounds} (worst samples)", columns, rows)


def _show_change(finding: TensorFix, now: WorstErrors | None, then: WorstErrors | None, name: str) -> str:
    shown = [format_number(getattr(errors, name) if errors else None) for errors in (now, then)]
    about = "about " if finding.chosen_option.approximate and then is not None else ""
    return f"{shown[0]} {ARROW} {about}{shown[1]}" if finding.changes_cast else shown[0]


def _show_share(share: float) -> str:
    return format_number(100 * share, "%")
