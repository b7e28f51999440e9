"""`nemo-fp8-debug` import, view, compact and sql: make, show and merge records."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..numerics.metric_names import name_metric
from ..record.imports import import_logs
from ..record.merging import Compacted, Size, compact, copy_record
from ..record.schema import SCHEMAS
from ..record.views import sql_views
from .console import AsJson, Record, console, print_json, print_text, show_progress
from .listing import Column, print_rows

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
    logs: Annotated[Path, typer.Argument(help="a log of nvdlfw_inspect or msProbe, or a folder of the logs of one run")],
    output: Annotated[str, typer.Argument(help="folder for the record, or any fsspec address")],
    as_json: AsJson = False,
) -> None:
    """Make a record of what another tool logged, for compare and TensorBoard."""
    with show_progress(f"reading {logs}"):
        found = import_logs(logs, output)
    steps = sorted(found.rows)
    losses = sum("loss" in scalars for scalars in found.steps.values())
    if as_json:
        counts = {"steps": len(steps), "first": steps[0], "last": steps[-1], "tensors": len(found.tensors), "losses": losses}
        told = {"tool": found.tool, "files": len(found.files), "output": output, **counts}
        print_json({**told, "metrics": found.mapped, "left_out": found.left_out})
        return
    out = console()
    print_text(out, f"Imported {len(found.files)} {found.tool} {'file' if len(found.files) == 1 else 'files'} into {output}")
    print_text(out, f"  steps    {len(steps)}, {steps[0]} to {steps[-1]}")
    print_text(out, f"  tensors  {len(found.tensors)}")
    print_text(out, f"  metrics  {', '.join(f'{name_metric(metric)} {n}' for metric, n in sorted(found.mapped.items()))}")
    print_text(out, f"  losses   {losses or 'none in the logs'}")
    if found.left_out:
        print_text(out, "Left out")
        for what, n in sorted(found.left_out.items()):
            print_text(out, f"  {n:>8}  {what}")


# --- view -----------------------------------------------------------------------------------------------------------------


def view_command(
    runs: Annotated[list[str], typer.Argument(help="folders of runs, or above some", metavar="RUNS...")],
    host: Annotated[str, typer.Option(metavar="NAME", help="name or address of this machine to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="port to listen at; 0: any that is free", min=0, max=65535)] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="open the page in a browser")] = False,
    export: Annotated[
        Path | None,
        typer.Option(help="write the page into this new folder, to open without a server", metavar="FOLDER"),
    ] = None,
) -> None:
    """Show the tab's page without TensorBoard: serve it, or write it into a folder."""
    for address in runs:
        if "://" not in address and not Path(address).is_dir():
            raise ConfigError(f"{address} is not a folder; name a run's folder or one above some")
    if export is not None:
        _export(export, runs)
    else:
        _serve(runs, host, port, open_)


def _export(folder: Path, runs: list[str]) -> None:
    from ..tensorboard_plugin.page.server import export_page

    with show_progress(f"writing {folder}"):
        files, size = export_page(folder, runs)
    print_text(console(), f"Wrote {files} files, {size / 1e6:.1f} MB. Open {folder / 'index.html'} in a browser.")


def _serve(runs: list[str], host: str, port: int, open_: bool) -> None:
    from ..tensorboard_plugin.page.server import bind_server
    from ..tensorboard_plugin.records.logdir import name_roots

    with contextlib.suppress(KeyboardInterrupt), bind_server(name_roots(runs), host, port) as serving:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{serving.port}/"
        print_text(console(), f"FP8 page of {', '.join(runs)} at {address} (Ctrl+C ends it)")
        if open_:
            webbrowser.open(address)
        serving.serve_forever()


# --- compact --------------------------------------------------------------------------------------------------------------

_HEADINGS = ("files", "rows", "MB")


def compact_command(
    run: Record,
    output: Annotated[
        str | None,
        typer.Option(metavar="NEW", help="new folder or fsspec address for the result; without it, RUN itself is changed"),
    ] = None,
    every: Annotated[
        int,
        typer.Option("--histograms-every", metavar="N", help="keep histograms of one sample in N steps", min=1),
    ] = 1,
    killed: Annotated[bool, typer.Option("--killed", help="the run is over, though its record does not say so")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge a record into few files. Every row stays, except histograms if you ask for fewer.

    Steps that triggers sampled, or that have NaN or infinity, keep their histograms, and so does the last sample. The
    run must have ended. A compaction that is interrupted loses nothing; start it again.
    """
    copying = [f"copying {run}"] if output else []
    with show_progress(*copying, *(f"merging {table}" for table in SCHEMAS)) as over:
        place = run
        if output:
            place = str(copy_record(run, output))
            over()
        done = compact(place, every, killed, over)
    if as_json:
        print_json({"run": str(done.run), "before": done.before, "after": done.after, "left_as_they_were": done.left})
    else:
        _print_sizes(done)


def _print_sizes(done: Compacted) -> None:
    out = console()
    columns = (Column("table", "name"), *(Column(f"{name} {when}") for name in _HEADINGS for when in ("before", "after")))
    sizes = {**done.before, "all": _add_up(done.before)}
    after = {**done.after, "all": _add_up(done.after)}
    rows = [_show_sizes(table, size, after.get(table, Size(0, 0, 0))) for table, size in sizes.items()]
    print_rows(out, str(done.run), columns, rows, entry=" ".join)
    if done.left:
        print_text(
            out, f"Left as they were, since they cannot be read whole: {len(done.left)} parts, the first {done.left[0]}"
        )


def _add_up(sizes: dict[str, Size]) -> Size:
    found = list(sizes.values())
    return Size(sum(s.files for s in found), sum(s.bytes for s in found), sum(s.rows for s in found))


def _show_sizes(table: str, before: Size, after: Size) -> tuple[str, ...]:
    counts = ((str(before.files), str(after.files)), (str(before.rows), str(after.rows)))
    size = f"{before.bytes / 1e6:.3g}", f"{after.bytes / 1e6:.3g}"
    return table, *(cell for pair in (*counts, size) for cell in pair)


# --- sql ------------------------------------------------------------------------------------------------------------------


def sql_command(
    run: Record,
    engine: Annotated[str, typer.Option(metavar="duckdb|spark", help="whose SQL it is")] = "duckdb",
) -> None:
    """Print SQL that makes views over the record's Parquet files, in DuckDB or Spark.

    Each table has the rows that read_record gives: the latest attempt's of a step, each once, with today's names.
    """
    print(sql_views(run, engine), end="")
