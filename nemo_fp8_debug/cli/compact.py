"""`nemo-fp8-debug compact RUN`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..record.merging import Compacted, Size, compact, copy_record
from ..record.schema import SCHEMAS
from .console import console, print_json, say, working
from .listing import Column, print_rows

EXAMPLES = (
    "runs/fp8",
    "runs/fp8 --histograms-every 1000",
    "runs/fp8 --output runs/smaller --json",
)
_HEADINGS = ("files", "rows", "MB")


def command(
    run: Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")],
    output: Annotated[
        str | None,
        typer.Option(metavar="NEW", help="new folder or fsspec address for the result; without it, RUN itself is changed"),
    ] = None,
    every: Annotated[
        int,
        typer.Option("--histograms-every", metavar="N", help="keep histograms of one sample in N steps", min=1),
    ] = 1,
    killed: Annotated[bool, typer.Option("--killed", help="the run is over, though its record does not say so")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Merge a record into few files. Every row stays, except histograms if you ask for fewer.

    Steps that triggers sampled, or that have NaN or infinity, keep their histograms, and so does the last sample. The
    run must have ended. A compaction that is interrupted loses nothing; start it again.
    """
    copying = [f"copying {run}"] if output else []
    with working(*copying, *(f"merging {table}" for table in SCHEMAS)) as over:
        place = run
        if output:
            place = str(copy_record(run, output))
            over()
        done = compact(place, every, killed, over)
    if as_json:
        print_json(_plain(done))
    else:
        _print(done)


def _plain(done: Compacted) -> dict[str, object]:
    before, after = ({table: asdict(size) for table, size in sizes.items()} for sizes in (done.before, done.after))
    return {"run": str(done.run), "before": before, "after": after, "left_as_they_were": done.left}


def _print(done: Compacted) -> None:
    out = console()
    columns = (Column("table", "name"), *(Column(f"{name} {when}") for name in _HEADINGS for when in ("before", "after")))
    sizes = {**done.before, "all": _total(done.before)}
    after = {**done.after, "all": _total(done.after)}
    rows = [_row(table, size, after.get(table, Size(0, 0, 0))) for table, size in sizes.items()]
    print_rows(out, str(done.run), columns, rows, entry=" ".join)
    if done.left:
        say(out, f"Left as they were, since they cannot be read whole: {len(done.left)} parts, the first {done.left[0]}")


def _total(sizes: dict[str, Size]) -> Size:
    found = list(sizes.values())
    return Size(sum(s.files for s in found), sum(s.bytes for s in found), sum(s.rows for s in found))


def _row(table: str, before: Size, after: Size) -> tuple[str, ...]:
    counts = ((str(before.files), str(after.files)), (str(before.rows), str(after.rows)))
    size = f"{before.bytes / 1e6:.3g}", f"{after.bytes / 1e6:.3g}"
    return table, *(cell for pair in (*counts, size) for cell in pair)
