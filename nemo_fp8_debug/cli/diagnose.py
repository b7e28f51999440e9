"""`nemo-fp8-debug diagnose RUN`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..analysis.diagnosis.diagnose import diagnose
from ..analysis.diagnosis.diagnosis import Diagnosis
from ..analysis.loss.outcome import MAX_GAP
from ..analysis.runs.cluster import on_cluster
from ..analysis.story.story import story, strip_text
from ..analysis.story.summary import story_markdown
from .cluster import Cluster
from .console import console, print_json, say, working
from .listing import Column, print_rows

#: columns that the events take at most, and how many of them are listed
_WIDEST, _LISTED = 110, 15
EXAMPLES = (
    "runs/fp8 --baseline runs/baseline",
    "runs/fp8 --baseline runs/baseline --reference runs/bf16",
    "runs/fp8 --baseline runs/good_a --baseline runs/good_b",
    "runs/fp8 --json",
    "runs/fp8 --baseline runs/baseline --markdown",
)


def command(
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
    by: Annotated[str, typer.Option(metavar="step|samples", help="match the runs by step, or by samples consumed")] = "step",
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
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown, for an issue")] = False,
    cluster: Cluster = None,
) -> None:
    """Say what is wrong with a run: the operand it began in, since when, why, and whether it did harm."""
    with on_cluster(cluster), working(f"diagnosing {run}"):
        found = diagnose(run, baseline, reference, by, max_gap, bands)
        told = story(found) if as_json or as_markdown else {}
    if as_json:
        print_json(found.to_json() | {"story": told})
    elif as_markdown:
        against = f" against {', '.join(each.name for each in baseline)}" if baseline else ""
        print(f"### {run.name}{against}: {told['headline']['title']}\n\n{story_markdown(told)}")
    else:
        _print(found)


def _print(found: Diagnosis) -> None:
    out = console()
    say(out, found.verdict())
    for note in (*found.details, *found.notes):
        say(out, f"note: {note}")
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
    say(out, "Order of events:")
    for line in strip_text(events, min(out.width, _WIDEST) - 2, unit).splitlines():
        out.print(f"  {line}", markup=False, highlight=False, no_wrap=True, overflow="ignore")
    for event in events[:_LISTED]:
        say(out, f"  {unit} {event['step']}: {event['what']}")
    if (left := len(events) - _LISTED) > 0:
        say(out, f"  and {left} more, all with --json")
