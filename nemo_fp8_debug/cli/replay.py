"""`nemo-fp8-debug replay RUN`."""

from __future__ import annotations

from typing import Annotated

import polars as pl
import typer

from ..analysis.comparison.compare import split_experts
from ..analysis.formatting import jsonable, number
from ..analysis.replay.replay import SOURCES, add_to_record, replay
from ..core.keys import SHOWN_AS
from ..errors import ConfigError, RecordError
from ..numerics.recipe import parse_recipe
from ..record.reader import find_run
from .console import console, print_json, say, working
from .listing import TENSOR, Column, print_rows

_SHOWN = ("relative_error", "underflow_pct", "overflow_pct")

EXAMPLES = (
    'runs/fp8 --recipe current --recipe "delayed(margin=1)"',
    "runs/fp8 --recipe current-e5m2 --json",
)


def command(
    run: Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")],
    recipe: Annotated[
        list[str], typer.Option(metavar="RECIPE", help="'current', 'current-e5m2', 'delayed(margin=1)'; may be repeated")
    ],
    source: Annotated[
        str, typer.Option(metavar="histograms|dumps", help="what to recompute from: histograms or dumps")
    ] = "histograms",
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="ray, ray://HOST:PORT, or tcp://HOST:PORT of a Dask scheduler")
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="tensors to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")] = False,
) -> None:
    """Recompute every metric under other recipes, add them to the record, and show what would have changed.

    Tensors are listed by relative error under the scales in use, worst first; medians over all steps.
    """
    if source not in SOURCES:
        raise ConfigError(f"--source {source!r}: expected {' or '.join(SOURCES)}")
    parsed = [parse_recipe(name) for name in recipe]
    storage = find_run(run)
    recipes = ", ".join(wanted.name for wanted in parsed)
    say(console(stderr=as_json), f"replay adds rows under {recipes} to the table `replayed` of {storage}.")
    with working(f"reading {run}", *(f"recomputing under {wanted.name}" for wanted in parsed)) as over:
        frames = {"in use": replay(storage, None, source, cluster)}
        if frames["in use"].is_empty():
            raise RecordError(f"{storage} has no {source} to replay")
        for wanted in parsed:
            over()
            frames[wanted.name] = replay(storage, wanted, source, cluster)
            add_to_record(storage, frames[wanted.name])
    added = sum(len(frame) for frame in frames.values()) - len(frames["in use"])
    if as_json:
        print_json(jsonable({"run": str(storage), "added": added, "tensors": _plain(frames)}))
        return
    _print(frames, top)
    say(console(), f"added {added} rows to the table `replayed` of {storage}")


def _medians(frames: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    return {
        name: frame.group_by("layer", "role", maintain_order=True).agg(pl.median(*_SHOWN)) for name, frame in frames.items()
    }


def _plain(frames: dict[str, pl.DataFrame]) -> list[dict[str, object]]:
    """A row a tensor and recipe, `in use` for the scales of the run."""
    return [{"recipe": name, **row} for name, rows in _medians(frames).items() for row in rows.to_dicts()]


def _print(frames: dict[str, pl.DataFrame], top: int) -> None:
    medians = _medians(frames)
    listed, experts = split_experts(medians["in use"])
    what = f"{len(listed)} tensors" + (", experts of a layer as one" if len(experts) else "")
    headings = [f"{metric} {name}" for metric in ("relative error", "underflow %", "overflow %") for name in frames]
    worst = listed.sort("relative_error", descending=True, nulls_last=True).head(top)
    by_key = {name: {(r["layer"], r["role"]): r for r in rows.to_dicts()} for name, rows in medians.items()}
    rows = []
    for layer, role in worst.select("layer", "role").rows():
        found = [by_key[name].get((layer, role), {}) for name in frames]
        rows.append((layer, SHOWN_AS[role], *(number(row.get(metric)) for metric in _SHOWN for row in found)))
    print_rows(console(), f"{what}, worst first; medians over all steps", (*TENSOR, *map(Column, headings)), rows)
