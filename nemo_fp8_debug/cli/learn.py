"""`nemo-fp8-debug learn RUNS --output bands.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..analysis.bands.bands import FEWEST, Bands
from ..analysis.runs.run import Run
from ..errors import ConfigError
from .console import console, print_json, say, working

EXAMPLES = ("runs/good_a runs/good_b --output bands.parquet",)


def command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs that went well")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="file to write; one that is there is not overwritten")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Learn what healthy runs do, so that a run without a baseline is judged by them: `diagnose RUN --bands FILE`."""
    if output.exists():
        raise ConfigError(f"{output} is there already, and is not overwritten")
    with working(*(f"reading {path}" for path in runs)) as over:
        bands = Bands.learn(_read(runs, over))
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
        say(console(), told)


def _read(runs: list[Path], over: Callable[[], None]) -> Iterator[Run]:
    for path in runs:
        yield Run.read(path)
        over()
