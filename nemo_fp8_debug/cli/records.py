"""`nemo-fp8-debug` import, view, compact and sql: make, show and merge records."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..core.text import ARROW, TableColumn, format_count, format_number
from ..errors import ConfigError
from ..numerics.metric_names import label_metric
from ..record.imports import import_logs
from ..record.merging import CompactionResult, SizeOfTableParts, compact_record, copy_record
from ..record.schema import SCHEMAS
from ..record.views import sql_views
from .console import (
    AsJson,
    Record,
    make_console,
    print_json,
    print_next_step,
    print_notes,
    print_table,
    print_text,
    show_progress,
)

EXAMPLES = {
    "import": (
        "logs runs/imported",
        "logs/nvdlfw_inspect_statistics_logs runs/imported --json",
    ),
    "view": (
        "runs",
        "runs/baseline runs/fp8 --host localhost",
        "runs/baseline runs/fp8 --export page",
    ),
    "compact": (
        "runs/fp8",
        "runs/fp8 --histograms-every 1000",
        "runs/fp8 --output runs/smaller --json",
    ),
    "sql": (
        "runs/fp8",
        "runs/fp8 --engine spark",
    ),
}


# --- import ---------------------------------------------------------------------------------------------------------------


def import_command(
    logs: Annotated[
        Path, typer.Argument(metavar="LOGS", help="a log of nvdlfw_inspect or msProbe, or a folder with the logs of one run")
    ],
    output: Annotated[str, typer.Argument(metavar="RUN", help="new folder for the record, or any fsspec address")],
    as_json: AsJson = False,
) -> None:
    """Convert another tool's logs to a record, for all commands and TensorBoard."""
    with show_progress(f"reading {logs}"):
        found = import_logs(logs, output)
    steps = sorted(found.rows)
    losses = sum("loss" in scalars for scalars in found.steps.values())
    if as_json:
        counts = {"steps": len(steps), "first": steps[0], "last": steps[-1], "tensors": len(found.tensors), "losses": losses}
        told = {"tool": found.tool, "files": len(found.files), "output": output, **counts}
        print_json({**told, "metrics": found.mapped, "left_out": found.left_out})
        return
    out = make_console()
    what = f"{format_count(len(found.files), f'{found.tool} file')} into {output}"
    which = f"{format_count(len(found.tensors), 'tensor')} at {format_count(len(steps), 'step')} ({steps[0]} to {steps[-1]})"
    print_text(out, f"We imported {what}: {which}, {format_count(losses, 'loss', 'losses') if losses else 'no losses'}.")
    rows = [(label_metric(metric), f"{n:,}") for metric, n in sorted(found.mapped.items())]
    print_table(out, "Values by metric", (TableColumn("metric", "text"), TableColumn("values")), rows)
    left = [(what, f"{n:,}") for what, n in sorted(found.left_out.items())]
    print_table(out, "Left out", (TableColumn("what", "text"), TableColumn("values")), left)
    print_next_step(out, command=["diagnose", output])


# --- view -----------------------------------------------------------------------------------------------------------------


def view_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="folders of runs, or folders above them")],
    host: Annotated[str, typer.Option(metavar="NAME", help="name or address of this machine to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="port to listen at; 0 for any free port", min=0, max=65535)] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="open the page in a browser")] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write the page into this new folder instead, to open without a server"),
    ] = None,
) -> None:
    """Show runs in the browser, without TensorBoard."""
    for address in runs:
        if "://" not in address and not Path(address).is_dir():
            raise ConfigError(f"{address} is not a folder; name the folder of a run, or a folder above runs")
    if export is not None:
        _export(export, runs)
    else:
        _serve(runs, host, port, open_)


def _export(folder: Path, runs: list[str]) -> None:
    from ..tensorboard_plugin.page.server import export_page

    with show_progress(f"writing {folder}"):
        files, size = export_page(folder, runs)
    out = make_console()
    print_text(out, f"We wrote {format_count(files, 'file')}, {format_number(size / 1e6)} MB, into {folder}.")
    print_next_step(out, f"open {folder / 'index.html'} in a browser.")


def _serve(runs: list[str], host: str, port: int, open_: bool) -> None:
    from ..tensorboard_plugin.page.server import make_bound_server
    from ..tensorboard_plugin.records.logdir import name_roots

    with contextlib.suppress(KeyboardInterrupt), make_bound_server(name_roots(runs), host, port) as serving:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{serving.port}/"
        print_text(make_console(), f"Serving {', '.join(runs)} at {address}")
        print_next_step(make_console(), f"open {address} in a browser. Ctrl+C ends the server.")
        if open_:
            webbrowser.open(address)
        serving.serve_forever()


# --- compact --------------------------------------------------------------------------------------------------------------


def compact_command(
    run: Record,
    output: Annotated[
        str | None,
        typer.Option(metavar="NEW", help="new folder or fsspec address for the result; without it, RUN itself is changed"),
    ] = None,
    every: Annotated[
        int,
        typer.Option("--histograms-every", metavar="N", help="keep the histograms of one sample in N steps", min=1),
    ] = 1,
    killed: Annotated[
        bool, typer.Option("--killed", help="the run was killed, so its record does not say that it has ended")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge the files of a record into a few files, without losing a row.

    --histograms-every drops histograms only. It keeps those of the last sample, of samples that a trigger caused, and of
    samples with NaN or infinity. The run must have ended. If a compaction is interrupted, start it again.
    """
    copying = [f"copying {run}"] if output else []
    with show_progress(*copying, *(f"merging {table}" for table in SCHEMAS)) as over:
        place = run
        if output:
            place = str(copy_record(run, output))
            over()
        done = compact_record(place, every, killed, over)
    if as_json:
        print_json({"run": str(done.run), "before": done.before, "after": done.after, "left_as_they_were": done.left})
    else:
        _print_sizes(done)


def _print_sizes(done: CompactionResult) -> None:
    out, before, after = make_console(), _add_up(done.before), _add_up(done.after)
    files = f"{format_count(before.files, 'file')} into {after.files:,}"
    sizes = f"{format_number(before.bytes / 1e6)} {ARROW} {format_number(after.bytes / 1e6)} MB"
    print_text(out, f"We merged {files} in {done.run}: {sizes}.")
    headings = ("files", "rows", "MB")
    columns = (
        TableColumn("table", "text"),
        *(TableColumn(f"{name} {when}") for name in headings for when in ("before", "after")),
    )
    rows = [
        _show_sizes(table, size, done.after.get(table, SizeOfTableParts(0, 0, 0))) for table, size in done.before.items()
    ]
    print_table(out, "Tables", columns, [*rows, _show_sizes("all", before, after)])
    if done.left:
        parts = format_count(len(done.left), "part")
        print_notes(out, [f"{parts} cannot be read whole and were left unchanged; the first is {done.left[0]}."])
    print_next_step(out, command=["view", str(done.run)])


def _add_up(sizes: dict[str, SizeOfTableParts]) -> SizeOfTableParts:
    found = list(sizes.values())
    return SizeOfTableParts(sum(s.files for s in found), sum(s.bytes for s in found), sum(s.rows for s in found))


def _show_sizes(table: str, before: SizeOfTableParts, after: SizeOfTableParts) -> tuple[str, ...]:
    counts = (f"{count:,}" for count in (before.files, after.files, before.rows, after.rows))
    return table, *counts, *(format_number(size.bytes / 1e6) for size in (before, after))


# --- sql ------------------------------------------------------------------------------------------------------------------


def sql_command(
    run: Record,
    engine: Annotated[str, typer.Option(metavar="duckdb|spark", help="engine that runs the SQL")] = "duckdb",
) -> None:
    """Print SQL that makes a view of each table of a record, for DuckDB or Spark.

    A view returns the same rows as read_record: each row once, from a step's latest attempt, with current names.
    """
    print(sql_views(run, engine), end="")
    print_next_step(make_console(stderr=True), f"run this SQL in {engine}, then query the views.")
