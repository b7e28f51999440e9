"""`nemo-fp8-debug diagnose RUN`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..analysis.diagnosis.diagnose import diagnose
from ..analysis.diagnosis.diagnosis import Diagnosis
from ..analysis.loss.outcome import MAX_GAP
from ..analysis.story.story import story
from .console import console


def command(
    run: Annotated[Path, typer.Argument(help="folder of the run to explain, or one above it")],
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", "--good", help="a run that went well; without it RUN is compared with its own beginning"),
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="a run that differs from RUN only in precision")] = None,
    by: Annotated[str, typer.Option(help="match the runs by step, or by samples consumed")] = "step",
    max_gap: Annotated[
        float, typer.Option(help="percent that the mean loss may lie above the baseline's before it counts as harm")
    ] = MAX_GAP,
    bands: Annotated[
        Path | None, typer.Option(help="bands of healthy runs (see learn), which a run without a baseline is judged by")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what is wrong with a run: the operand it began in, since when, why, and whether it did harm."""
    found = diagnose(run, baseline, reference, by, max_gap, bands)
    if as_json:
        print(json.dumps(found.to_json() | {"story": story(found)}, indent=2))
    else:
        _print(found)


def _print(found: Diagnosis) -> None:
    out = console()
    for sentence in (found.verdict(), *found.notes):
        out.print(sentence, soft_wrap=True, highlight=False, markup=False)
    for advice in found.advice:
        out.print(f"- {advice}", markup=False, highlight=False)
    if len(found.events) > 1:
        out.print("Order of events:")
        for event in found.events:
            out.print(f"  {found.run.unit} {event.step}: {event.what}", markup=False, highlight=False)
    out.print()
    table = Table(title="What the rules found, which the verdict rests on", title_justify="left")
    for heading in ("rule", "since", "about", "cause", "confidence", "evidence"):
        table.add_column(heading)
    for finding in found.findings:
        since = "-" if finding.since is None else str(finding.since)
        about, evidence = (escape(text) for text in (finding.operand or "the run", finding.evidence))
        table.add_row(finding.rule, since, about, finding.cause, finding.confidence, evidence)
    out.print(table)
