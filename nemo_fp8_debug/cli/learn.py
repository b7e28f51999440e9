"""`nemo-fp8-debug learn RUNS --output bands.parquet`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..analysis.bands.bands import FEWEST, Bands
from ..analysis.runs.run import Run
from ..errors import ConfigError
from .console import console


def command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs that went well")],
    output: Annotated[Path, typer.Option(help="file to write; one that is there is not overwritten")],
) -> None:
    """Learn what healthy runs do, so that a run without a baseline is judged by them: `diagnose RUN --bands FILE`."""
    if output.exists():
        raise ConfigError(f"{output} is there already, and is not overwritten")
    bands = Bands.learn(Run.read(path) for path in runs)
    bands.write(output)
    kinds = bands.table.select("purpose", "role", "recipe", "part").unique()
    judged = bands.table.filter(bands.table["runs"] >= FEWEST).select(kinds.columns).unique()
    told = f"{output}: {bands.runs} runs of {', '.join(bands.families) or 'unknown models'}, {len(kinds)} kinds of operands"
    if len(judged) < len(kinds):
        told += f"; {len(kinds) - len(judged)} of them come from fewer than {FEWEST} runs, and are not judged by"
    console().print(told, markup=False, highlight=False, soft_wrap=True)
