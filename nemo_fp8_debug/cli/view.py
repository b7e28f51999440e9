"""`nemo-fp8-debug view RUNS`."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import console, say, working

EXAMPLES = (
    "runs",
    "runs/baseline runs/fp8 --host localhost",
    "runs/baseline runs/fp8 --export page",
)


def command(
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
    from ..tensorboard_plugin.page.export import export_page

    with working(f"writing {folder}"):
        files, size = export_page(folder, runs)
    say(console(), f"Wrote {files} files, {size / 1e6:.1f} MB. Open {folder / 'index.html'} in a browser.")


def _serve(runs: list[str], host: str, port: int, open_: bool) -> None:
    from ..tensorboard_plugin.page.server import bind_server
    from ..tensorboard_plugin.records.logdir import name_roots

    with contextlib.suppress(KeyboardInterrupt), bind_server(name_roots(runs), host, port) as serving:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{serving.port}/"
        say(console(), f"FP8 page of {', '.join(runs)} at {address} (Ctrl+C ends it)")
        if open_:
            webbrowser.open(address)
        serving.serve_forever()
