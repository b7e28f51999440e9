"""`nemo-fp8-debug sql RUN`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..record.views import sql_views

EXAMPLES = (
    "runs/fp8",
    "runs/fp8 --engine spark",
)


def command(
    run: Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")],
    engine: Annotated[str, typer.Option(metavar="duckdb|spark", help="whose SQL it is")] = "duckdb",
) -> None:
    """Print SQL that makes views over the record's Parquet files, in DuckDB or Spark.

    Each table has the rows that read_record gives: the latest attempt's of a step, each once, with today's names.
    """
    print(sql_views(run, engine), end="")
