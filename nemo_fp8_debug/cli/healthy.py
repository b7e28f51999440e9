"""`nemo-fp8-debug` gate and learn: accept a run, and learn what healthy runs do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..analysis.bands.bands import FEWEST, Bands
from ..analysis.loss.gap import CHECK_DATA
from ..analysis.loss.gate import CANNOT_TELL, ERROR, FAIL, PASS, PUBLISHED, THIS_PAIR, TRAINING, Acceptance, Gate, accept
from ..analysis.runs.run import Run
from ..core.text import format_number
from ..errors import ConfigError, RecordError
from .console import AsJson, By, console, print_json, print_text, show_progress

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
    run: Annotated[list[Path], typer.Argument(help="folder of the run, or one above it; several seeds of a recipe")],
    baseline: Annotated[
        list[Path],
        typer.Option("--baseline", "--good", metavar="RUN", help="a run that went well; may be repeated, one for each RUN"),
    ],
    max_gap: Annotated[
        str, typer.Option(metavar="PERCENT", help="percent that the mean loss may lie above the baseline's: 0.5%")
    ],
    last: Annotated[str, typer.Option(metavar="PERCENT", help="part of the steps, from the end, whose mean counts")] = "20%",
    after: Annotated[int | None, typer.Option(metavar="STEP", help="instead: the steps after this one")] = None,
    by: By = "step",
    as_json: AsJson = False,
) -> None:
    """Accept a run or not. Exit with 0 if the gap is below the limit, 1 if it is above or the loss is far below the
    baseline's, 3 if we cannot tell."""
    limit, part = _parse_percent(max_gap, "--max-gap"), _parse_percent(last, "--last") / 100
    runs, baselines = ([Run.read(path, by, held=0) for path in paths] for paths in (run, baseline))
    found = accept(runs, baselines, limit, part, after)
    if found is None:
        few = "share fewer than 10 losses in what is compared, or the baseline's are all zero"
        raise RecordError(f"{run[0]} and its baseline {few}")
    if as_json:
        print_json(found)
    else:
        for line in tell_outcome(found, runs[0].unit):
            print_text(console(), line)
    raise typer.Exit(STATUS[found.outcome])


def _parse_percent(text: str, option: str) -> float:
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no percentage; write it like 0.5%") from None


def tell_outcome(found: Acceptance, unit: str) -> list[str]:
    """The answer in a line, and what to bear in mind."""
    first, decisive = found.loss.gaps[0], found.gates[found.decisive]
    lines = [f"{found.outcome.upper()}: {_tell_gap(found.decisive, decisive, unit)}; limit {decisive.max_gap:g}%."]
    if any(each.is_far_below for each in found.gates.values()):
        lines.append(f"A loss far below the baseline's does not pass. {CHECK_DATA}")
    if found.outcome == CANNOT_TELL:
        lines.append(_tell_missing(decisive, unit))
    for name, each in found.gates.items():
        if name != found.decisive:
            lines.append(f"{each.outcome.capitalize()}: {_tell_gap(name, each, unit)}.")
    lines += [f"Not judged: validation, {name}; {why}." for name, why in found.not_judged.items()]
    if decisive.of == THIS_PAIR:
        batches = "the same batches" if first.paired else "other batches"
        lines.append(
            f"One pair of runs ({batches}) cannot tell what the recipe does from what the seed does: give several RUNs and "
            "--baselines for that."
        )
    lines += [f"Published: {gap}, {what}." for gap, what in PUBLISHED]
    return lines


def _tell_gap(name: str, each: Gate, unit: str) -> str:
    """A gap, in a clause."""
    (low, high), gap = each.bounds, each.gaps[0]
    where = f"{unit}s {gap.first} to {gap.last}, {gap.n} {'losses' if name == TRAINING else 'evaluations'}"
    of = each.of if name == TRAINING else f"{each.of} ({name})"
    sure = 100 * (1 - ERROR / each.together)
    above = f"{sure:.3g}% sure above {low:+.3g}%"
    below = f"and {'' if each.together == 1 else '95% sure '}below {high:+.3g}%"
    range_ = " of the range of the baseline's losses" if gap.of_range else ""
    return f"the gap of {of} is {each.gap:+.3g}%{range_}, {above} {below} ({where})"


def _tell_missing(found: Gate, unit: str) -> str:
    if found.of != THIS_PAIR:
        return "More seeds of the run and of the baseline would tell."
    if found.more_steps is None:
        return "The gap is as large as the limit: no number of steps would tell."
    return f"About {format_number(float(found.more_steps))} more {unit}s would tell, if the gap is what it seems."


# --- learn ----------------------------------------------------------------------------------------------------------------


def learn_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs that went well")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="file to write; one that is there is not overwritten")],
    as_json: AsJson = False,
) -> None:
    """Learn what healthy runs do, so that a run without a baseline is judged by them: `diagnose RUN --bands FILE`."""
    if output.exists():
        raise ConfigError(f"{output} is there already, and is not overwritten")
    with show_progress(*(f"reading {path}" for path in runs)) as over:
        bands = Bands.learn(_read_runs(runs, over))
    bands.write(output)
    kinds = bands.table.select("purpose", "role", "recipe", "part").unique()
    judged = bands.table.filter(bands.table["runs"] >= FEWEST).select(kinds.columns).unique()
    told = f"{output}: {bands.runs} runs of {', '.join(bands.families) or 'unknown models'}, {len(kinds)} kinds of operands"
    if len(judged) < len(kinds):
        told += f"; {len(kinds) - len(judged)} of them come from fewer than {FEWEST} runs, and are not judged by"
    if as_json:
        plain = {"runs": bands.runs, "families": list(bands.families), "kinds": len(kinds), "judged": len(judged)}
        print_json({"output": str(output), **plain})
    else:
        print_text(console(), told)


def _read_runs(runs: list[Path], over: Callable[[], None]) -> Iterator[Run]:
    for path in runs:
        yield Run.read(path)
        over()
