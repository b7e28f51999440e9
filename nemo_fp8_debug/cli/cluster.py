"""The option that has a cluster do the work."""

from __future__ import annotations

from typing import Annotated

import typer

#: of commands that read long records
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ray|dask|ADDRESS",
        help="share the work on long records: ray or dask on this machine, or ray://HOST:10001 or tcp://HOST:8786",
    ),
]
