"""`nemo-fp8-debug replay RUN`."""

from __future__ import annotations

from typing import Annotated

import polars as pl
import typer
from rich.markup import escape
from rich.table import Table

from ..analysis.comparison.compare import split_experts
from ..analysis.formatting import number
from ..analysis.replay.replay import SOURCES, add_to_record, replay
from ..core.keys import SHOWN_AS
from ..errors import ConfigError, RecordError
from ..numerics.recipe import parse_recipe
from ..record.reader import find_run
from .console import console

_SHOWN = ("relative_error", "underflow_pct", "overflow_pct")


def command(
    run: Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")],
    recipe: Annotated[list[str], typer.Option(help="'current', 'current-e5m2', 'delayed(margin=1)'; may be repeated")],
    source: Annotated[str, typer.Option(help="what to recompute from: histograms or dumps")] = "histograms",
    cluster: Annotated[str | None, typer.Option(help="ray, ray://HOST:PORT, or tcp://HOST:PORT of a Dask scheduler")] = None,
    top: Annotated[int, typer.Option(help="tensors to list", min=1)] = 15,
) -> None:
    """Recompute every metric under other recipes, add them to the record, and show what would have changed.

    Tensors are listed by relative error under the scales in use, worst first; medians over all steps.
    """
    if source not in SOURCES:
        raise ConfigError(f"source is {source!r}; use {' or '.join(SOURCES)}")
    parsed = [parse_recipe(name) for name in recipe]
    storage = find_run(run)
    frames = {"in use": replay(storage, None, source, cluster)}
    if frames["in use"].is_empty():
        raise RecordError(f"{storage} has no {source} to replay")
    for wanted in parsed:
        frames[wanted.name] = replay(storage, wanted, source, cluster)
        add_to_record(storage, frames[wanted.name])
    _print(frames, top)
    added = sum(len(frame) for frame in frames.values()) - len(frames["in use"])
    console().print(f"added {added} rows to the table `replayed` of {escape(str(storage))}", soft_wrap=True)


def _print(frames: dict[str, pl.DataFrame], top: int) -> None:
    medians = {
        name: frame.group_by("layer", "role", maintain_order=True).agg(pl.median(*_SHOWN)) for name, frame in frames.items()
    }
    listed, experts = split_experts(medians["in use"])
    what = f"{len(listed)} tensors" + (", experts of a layer as one" if len(experts) else "")
    table = Table(title=f"{what}, worst first; medians over all steps", title_justify="left")
    table.add_column("layer", no_wrap=True)
    table.add_column("tensor")
    for metric in ("relative error", "underflow %", "overflow %"):
        for name in frames:
            table.add_column(f"{metric}\n{escape(name)}", justify="right")
    worst = listed.sort("relative_error", descending=True, nulls_last=True).head(top)
    by_key = {name: {(r["layer"], r["role"]): r for r in rows.to_dicts()} for name, rows in medians.items()}
    for layer, role in worst.select("layer", "role").rows():
        found = [by_key[name].get((layer, role), {}) for name in frames]
        table.add_row(escape(layer), SHOWN_AS[role], *(number(row.get(metric)) for metric in _SHOWN for row in found))
    console().print(table)
