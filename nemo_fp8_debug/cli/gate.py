"""`nemo-fp8-debug gate RUN --baseline BASELINE --max-gap 0.5%`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..analysis.formatting import number
from ..analysis.loss.gap import CHECK_DATA
from ..analysis.loss.gate import CANNOT_TELL, ERROR, FAIL, PASS, PUBLISHED, THIS_PAIR, TRAINING, Acceptance, Gate, accept
from ..analysis.runs.run import Run
from ..errors import ConfigError, RecordError
from .console import console, print_json, say

#: exit codes; 2 is for wrong usage
STATUS = {PASS: 0, FAIL: 1, CANNOT_TELL: 3}

EXAMPLES = (
    "runs/fp8 --baseline runs/baseline --max-gap 0.5%",
    "runs/fp8 --baseline runs/baseline --max-gap 0.5% --last 50% --json",
)


def command(
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
    by: Annotated[str, typer.Option(metavar="step|samples", help="match the runs by step, or by samples consumed")] = "step",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Accept a run or not. Exit with 0 if the gap is below the limit, 1 if it is above or the loss is far below the
    baseline's, 3 if we cannot tell."""
    limit, part = _percent(max_gap, "--max-gap"), _percent(last, "--last") / 100
    runs, baselines = ([Run.read(path, by, held=0) for path in paths] for paths in (run, baseline))
    found = accept(runs, baselines, limit, part, after)
    if found is None:
        few = "share fewer than 10 losses in what is compared, or the baseline's are all zero"
        raise RecordError(f"{run[0]} and its baseline {few}")
    if as_json:
        print_json(found.to_json())
    else:
        for line in told(found, runs[0].unit):
            say(console(), line)
    raise typer.Exit(STATUS[found.outcome])


def _percent(text: str, option: str) -> float:
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no percentage; write it like 0.5%") from None


def told(found: Acceptance, unit: str) -> list[str]:
    """The answer in a line, and what to bear in mind."""
    first, decisive = found.loss.gaps[0], found.gates[found.decisive]
    lines = [f"{found.outcome.upper()}: {_clause(found.decisive, decisive, unit)}; limit {decisive.max_gap:g}%."]
    if any(each.is_far_below for each in found.gates.values()):
        lines.append(f"A loss far below the baseline's does not pass. {CHECK_DATA}")
    if found.outcome == CANNOT_TELL:
        lines.append(_what_would_tell(decisive, unit))
    for name, each in found.gates.items():
        if name != found.decisive:
            lines.append(f"{each.outcome.capitalize()}: {_clause(name, each, unit)}.")
    lines += [f"Not judged: validation, {name}; {why}." for name, why in found.not_judged.items()]
    if decisive.of == THIS_PAIR:
        batches = "the same batches" if first.paired else "other batches"
        lines.append(
            f"One pair of runs ({batches}) cannot tell what the recipe does from what the seed does: give several RUNs and "
            "--baselines for that."
        )
    lines += [f"Published: {gap}, {what}." for gap, what in PUBLISHED]
    return lines


def _clause(name: str, each: Gate, unit: str) -> str:
    """A gap, in a clause."""
    (low, high), gap = each.bounds, each.gaps[0]
    where = f"{unit}s {gap.first} to {gap.last}, {gap.n} {'losses' if name == TRAINING else 'evaluations'}"
    of = each.of if name == TRAINING else f"{each.of} ({name})"
    sure = 100 * (1 - ERROR / each.together)
    above = f"{sure:.3g}% sure above {low:+.3g}%"
    below = f"and {'' if each.together == 1 else '95% sure '}below {high:+.3g}%"
    range_ = " of the range of the baseline's losses" if gap.of_range else ""
    return f"the gap of {of} is {each.gap:+.3g}%{range_}, {above} {below} ({where})"


def _what_would_tell(found: Gate, unit: str) -> str:
    if found.of != THIS_PAIR:
        return "More seeds of the run and of the baseline would tell."
    if found.more_steps is None:
        return "The gap is as large as the limit: no number of steps would tell."
    return f"About {number(float(found.more_steps))} more {unit}s would tell, if the gap is what it seems."
