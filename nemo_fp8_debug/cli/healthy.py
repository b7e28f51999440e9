"""`nemo-fp8-debug` gate and learn: accept a run, and learn bands from healthy runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..analysis.bands.bands import FEWEST, HealthyBands
from ..analysis.loss.gap import CHECK_DATA
from ..analysis.loss.gate import (
    CANNOT_TELL,
    ERROR,
    FAIL,
    PASS,
    PUBLISHED,
    THIS_PAIR,
    TRAINING,
    GateResult,
    LossGate,
    gate_all_losses,
)
from ..analysis.runs.run import Run
from ..core.text import format_count, format_number
from ..errors import ConfigError, RecordError
from .console import (
    AsJson,
    By,
    make_console,
    print_json,
    print_next_step,
    print_notes,
    print_text,
    repeat_option,
    show_progress,
)

EXAMPLES = {
    "gate": (
        "runs/fp8 --baseline runs/baseline --max-gap 0.5%",
        "runs/fp8 --baseline runs/baseline --max-gap 0.5% --last 50% --json",
    ),
    "learn": ("runs/good_a runs/good_b --output bands.parquet",),
}


# --- gate -----------------------------------------------------------------------------------------------------------------

#: exit codes; 2 is for wrong usage
STATUS = {PASS: 0, FAIL: 1, CANNOT_TELL: 3}


def gate_command(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="folder or address of a run, or a folder above it; several: seeds of one recipe"
        ),
    ],
    baseline: Annotated[
        list[str],
        typer.Option("--baseline", "--good", metavar="BASELINE", help="a good run; repeat it, once for each RUN"),
    ],
    max_gap: Annotated[str, typer.Option(metavar="PERCENT", help="maximum loss gap over the baseline, e.g. 0.5%")],
    last: Annotated[
        str, typer.Option(metavar="PERCENT", help="compare the mean loss of this share of the steps, at the end of the run")
    ] = "20%",
    after: Annotated[
        int | None, typer.Option(metavar="STEP", help="compare the mean loss of all steps after this step instead")
    ] = None,
    by: By = "step",
    as_json: AsJson = False,
) -> None:
    """Accept a run if its loss is close enough to a good run's loss.

    Exit status: 0 if the gap is below the limit, 1 if the gap is above the limit or the loss is far below the baseline's
    loss, 3 if we cannot tell, 2 for wrong usage.
    """
    limit, part = _parse_percent(max_gap, "--max-gap"), _parse_percent(last, "--last") / 100
    runs, baselines = ([Run.read(path, by, held=0) for path in paths] for paths in (run, baseline))
    found = gate_all_losses(runs, baselines, limit, part, after)
    if found is None:
        few = "share fewer than 10 losses in the compared steps, or the baseline's losses are all zero"
        raise RecordError(f"{run[0]} and its baseline {few}")
    if as_json:
        print_json(found)
    else:
        out, (first, *others) = make_console(), tell_outcome(found, runs[0].unit)
        print_text(out, first)
        print_notes(out, others)
        if found.outcome == FAIL:
            print_next_step(out, command=["diagnose", str(run[0]), *repeat_option("--baseline", baseline)])
        elif found.outcome == PASS:
            print_next_step(out, "accept the run. It is as good as its baseline, within the limit.")
        else:
            print_next_step(out, "train on, or repeat the run and its baseline with more seeds.")
    raise typer.Exit(STATUS[found.outcome])


def _parse_percent(text: str, option: str) -> float:
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no percentage; write it as 0.5%") from None


def tell_outcome(found: GateResult, unit: str) -> list[str]:
    """Return the outcome as a sentence, followed by notes on it."""
    first, decisive = found.loss.gaps[0], found.gates[found.decisive_loss_name]
    limit = format_number(decisive.max_gap, "%")
    lines = [f"{found.outcome.upper()}: {_tell_gap(found.decisive_loss_name, decisive, unit)}; limit {limit}."]
    if any(each.is_far_below for each in found.gates.values()):
        lines.append(f"A loss far below the baseline's loss does not pass. {CHECK_DATA}")
    if found.outcome == CANNOT_TELL:
        lines.append(_tell_missing(decisive, unit))
    for name, each in found.gates.items():
        if name != found.decisive_loss_name:
            lines.append(f"{each.outcome.capitalize()}: {_tell_gap(name, each, unit)}.")
    lines += [f"Not judged: validation, {name}; {why}." for name, why in found.not_judged.items()]
    if decisive.of == THIS_PAIR:
        batches = "the same batches" if first.paired else "other batches"
        lines.append(
            f"One pair of runs ({batches}) cannot separate the effect of the recipe from the effect of the seed: give "
            "several RUNs and --baselines to do that."
        )
    lines += [f"Published: {gap}, {what}." for gap, what in PUBLISHED]
    return lines


def _tell_gap(name: str, each: LossGate, unit: str) -> str:
    """Return a clause with a gap, its bounds and its steps."""
    low, high = (format_number(bound, "%", signed=True) for bound in each.confidence_bounds)
    gap = each.gaps[0]
    n = format_count(gap.n, *(("loss", "losses") if name == TRAINING else ("evaluation",)))
    where = f"{unit}s {gap.first} to {gap.last}, {n}"
    of = each.of if name == TRAINING else f"{each.of} ({name})"
    sure = 100 * (1 - ERROR / each.together)
    above = f"{format_number(sure, '%')} sure above {low}"
    below = f"and {'' if each.together == 1 else '95% sure '}below {high}"
    range_ = " of the range of the baseline's losses" if gap.of_range else ""
    return f"the gap of {of} is {format_number(each.gap, '%', signed=True)}{range_}, {above} {below} ({where})"


def _tell_missing(found: LossGate, unit: str) -> str:
    if found.of != THIS_PAIR:
        return "More seeds of the run and of the baseline would decide."
    if found.estimated_steps_to_decide is None:
        return "The gap is as large as the limit: no number of steps would decide."
    more = format_number(float(found.estimated_steps_to_decide))
    return f"About {more} more {unit}s would decide, if the gap stays the same."


# --- learn ----------------------------------------------------------------------------------------------------------------


def learn_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="folders of good runs")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="output file, e.g. bands.parquet; must not exist")],
    as_json: AsJson = False,
) -> None:
    """Learn bands from your healthy runs, to judge later runs that have no baseline."""
    if output.exists():
        raise ConfigError(f"{output} exists and is not overwritten; name another file")
    with show_progress(*(f"reading {path}" for path in runs)) as over:
        bands = HealthyBands.learn(_read_runs(runs, over))
    bands.write(output)
    kinds = bands.table.select("purpose", "role", "recipe", "part").unique()
    judged = bands.table.filter(bands.table["runs"] >= FEWEST).select(kinds.columns).unique()
    if as_json:
        plain = {"runs": bands.runs, "families": list(bands.families), "kinds": len(kinds), "judged": len(judged)}
        print_json({"output": str(output), **plain})
        return
    out, n = make_console(), format_count(bands.runs, "run")
    families = ", ".join(bands.families) or "unknown models"
    kinds_told = format_count(len(kinds), "kind of operand", "kinds of operands")
    print_text(out, f"We learned bands for {len(judged)} of {kinds_told} from {n} of {families}, and wrote {output}.")
    if len(judged) < len(kinds):
        print_notes(out, [f"The other kinds come from fewer than {FEWEST} runs, so we ignore them. Add runs to use them."])
    print_next_step(out, command=["diagnose", "RUN", "--bands", str(output)])


def _read_runs(runs: list[str], over: Callable[[], None]) -> Iterator[Run]:
    for path in runs:
        yield Run.read(path)
        over()
