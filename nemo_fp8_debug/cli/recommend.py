"""`nemo-fp8-debug recommend RUN`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..analysis.diagnosis.diagnose import diagnose
from ..analysis.diagnosis.narrator import tell_advice, tell_verdict
from ..analysis.formatting import number
from ..analysis.recommendation.options import Budget, Errors
from ..analysis.recommendation.recommend import Recommendation, TensorFix
from ..analysis.recommendation.snippets import PLAN, snippets_of, unwritten, write
from ..analysis.recommendation.snippets.snippet import Snippet
from ..analysis.runs.cluster import on_cluster
from ..core.keys import ROLES, SHOWN_AS, Key
from ..errors import ConfigError
from .cluster import Cluster
from .console import console, print_json, say, working
from .listing import TENSOR, Column, print_rows

_DEFAULT = Budget()

EXAMPLES = (
    "runs/fp8 --baseline runs/baseline",
    "runs/fp8 --operand decoder.layers.1.mlp.linear_fc2:X --output fix",
    "runs/fp8 --underflow 5 --json",
)


def command(
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
    with on_cluster(cluster), working(f"diagnosing {run}", "trying changes") as over:
        diagnosis = diagnose(run, baseline)
        over()
        found = diagnosis.recommend(budget, [_key(text) for text in operand or ()])
    advice = [] if operand else tell_advice(diagnosis, diagnosis.find_fix(found))
    output = output if found.plan.changes else None
    snippets = write(found, output) if output else snippets_of(found)
    if as_json:
        print_json(found.to_json() | {"advice": advice})
        return
    if not operand:
        say(console(), tell_verdict(diagnosis, advice))
    _print(console(), found, snippets, output)


def _key(text: str) -> Key:
    layer, _, role = text.rpartition(":")
    roles = {SHOWN_AS[role]: role for role in ROLES} | {role: role for role in ROLES}
    if not layer or role not in roles:
        raise ConfigError(f"--operand {text!r} is not an operand; write LAYER:ROLE, the role X, W or dY")
    return layer, roles[role]


def _print(out: Console, found: Recommendation, snippets: list[Snippet], folder: Path | None) -> None:
    if not found.findings and not found.notes:
        say(out, "No recipe is to blame: there is nothing to change, and nothing was written.")
        return
    if found.findings:
        _print_findings(out, found)
    for line in _lines(found, snippets, folder):
        say(out, line)


def _lines(found: Recommendation, snippets: list[Snippet], folder: Path | None) -> Iterator[str]:
    """What there is to say below the table."""
    if found.before is not None and found.after is not None:
        of_what = "" if found.in_use else ", if all that was measured were quantized"
        yield f"FP8 coverage, share of the GEMMs' FLOPs{of_what}: {_percent(found.before)} -> {_percent(found.after)}."
    if found.ends:
        kept = "" if found.ends.coverage is None else f"; coverage would be {_percent(found.ends.coverage)}"
        ends = f"the first {found.ends.start} and last {found.ends.end} blocks in BF16"
        yield f"What leaves FP8 lies at the ends of the model: {ends} would do as well{kept}."
    yield from found.notes
    for snippet in snippets:
        yield f"{snippet.about}: {snippet.name if folder is None else folder / snippet.name}"
        yield from (f"  {sentence}" for sentence in snippet.coarser)
    yield from unwritten(found)
    if not found.plan.changes:
        yield "There is nothing to change, and nothing was written."
    elif folder is None:
        yield "Nothing was written; --output FOLDER writes the plan and these files."
    else:
        yield f"the plan: {folder / PLAN}"


def _print_findings(out: Console, found: Recommendation) -> None:
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
        metrics = [_pair(finding, stay.errors, chosen.errors, name) for name in Errors.__annotations__]
        cost = "-" if finding.cost is None else _percent(finding.cost)
        rows.append((finding.layer, SHOWN_AS[finding.role], finding.why, stay.recipe, finding.change, *metrics, cost))
    print_rows(out, f"Cheapest changes that keep to {bounds}, worst samples", columns, rows)


def _pair(finding: TensorFix, now: Errors | None, then: Errors | None, name: str) -> str:
    shown = [number(getattr(errors, name) if errors else None) for errors in (now, then)]
    about = "about " if finding.chosen.approximate and then is not None else ""
    return f"{shown[0]} -> {about}{shown[1]}" if finding.changes else shown[0]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
