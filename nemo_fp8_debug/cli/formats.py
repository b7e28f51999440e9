"""`nemo-fp8-debug` replay and audit: the errors of a run's tensors, and of a checkpoint's weights, under other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from ..analysis.checkpoint.audit import CheckpointAudit, audit, lacks_scale
from ..analysis.comparison.compare import split_off_single_experts
from ..analysis.replay.replay import SOURCES, replay, write_replayed_rows
from ..core.keys import SHOWN_AS
from ..core.layer_names import compile_layer_patterns
from ..core.text import ABSENT, TENSOR, TableColumn, format_count, format_number
from ..errors import ConfigError, RecordError
from ..numerics.recipe import parse_recipe
from ..record.reader import find_record
from .console import (
    AsWholeJson,
    Record,
    Top,
    make_console,
    print_json,
    print_next_step,
    print_notes,
    print_table,
    print_text,
    show_progress,
)

EXAMPLES = {
    "replay": (
        'runs/fp8 --recipe current --recipe "delayed(margin=1)"',
        "runs/fp8 --recipe current-e5m2 --json",
    ),
    "audit": (
        "checkpoints/step_1000",
        'checkpoints/step_1000 --layers "*.mlp.*" --json',
    ),
}


# --- replay ---------------------------------------------------------------------------------------------------------------

_SHOWN = ("relative_error", "underflow_pct", "overflow_pct")


def replay_command(
    run: Record,
    recipe: Annotated[
        list[str],
        typer.Option(metavar="RECIPE", help="recipe to try: current, current-e5m2, 'delayed(margin=1)'; may be repeated"),
    ],
    source: Annotated[
        str, typer.Option(metavar="histograms|dumps", help="what to recompute from: recorded histograms, or dumped tensors")
    ] = "histograms",
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="share the work: ray, ray://HOST:PORT, or tcp://HOST:PORT of a Dask scheduler"),
    ] = None,
    top: Top = 15,
    as_json: AsWholeJson = False,
) -> None:
    """Recompute every metric of a run under other recipes, and add the results to its record.

    The table lists tensors by relative error under the scales in use, worst first. Its values are medians over all steps.
    """
    if source not in SOURCES:
        raise ConfigError(f"--source {source!r}: expected {' or '.join(SOURCES)}")
    parsed = [parse_recipe(name) for name in recipe]
    storage = find_record(run)
    recipes = ", ".join(wanted.name for wanted in parsed)
    print_text(make_console(stderr=True), f"replay adds rows under {recipes} to the table `replayed` of {storage}.")
    with show_progress(f"reading {run}", *(f"recomputing under {wanted.name}" for wanted in parsed)) as over:
        frames = {"in use": replay(storage, None, source, cluster)}
        if frames["in use"].is_empty():
            raise RecordError(f"{storage} has no {source} to replay")
        for wanted in parsed:
            over()
            frames[wanted.name] = replay(storage, wanted, source, cluster)
            write_replayed_rows(storage, frames[wanted.name])
    added = sum(len(frame) for frame in frames.values()) - len(frames["in use"])
    if as_json:
        # One row for each tensor and recipe. The recipe `in use` means the scales of the run.
        plain = [{"recipe": name, **row} for name, rows in _medians(frames).items() for row in rows.to_dicts()]
        print_json({"run": str(storage), "added": added, "tensors": plain})
        return
    medians, out = _medians(frames), make_console()
    print_text(out, f"{_tell_best(medians)} We added {format_count(added, 'row')} to the table `replayed` of {storage}.")
    _print_replayed(medians, top)
    print_next_step(out, command=["view", run])


def _tell_best(medians: dict[str, pl.DataFrame]) -> str:
    """Return a sentence that names the recipe with the lowest relative error."""
    errors = {name: rows["relative_error"].median() for name, rows in medians.items()}
    known = {name: float(error) for name, error in errors.items() if isinstance(error, (int, float))}
    if not known:
        return "No relative error is known."
    best = min(known, key=lambda name: known[name])
    own = f", {format_number(known['in use'])} in use" if best != "in use" and "in use" in known else ""
    which = "The scales in use have" if best == "in use" else f"Recipe {best} has"
    return f"{which} the lowest relative error: {format_number(known[best])} in the median of all tensors{own}."


def _medians(frames: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    return {
        name: frame.group_by("layer", "role", maintain_order=True).agg(pl.median(*_SHOWN)) for name, frame in frames.items()
    }


def _print_replayed(medians: dict[str, pl.DataFrame], top: int) -> None:
    listed, experts = split_off_single_experts(medians["in use"])
    what = format_count(len(listed), "tensor") + (", experts of a layer as one" if len(experts) else "")
    metrics = ("relative error", "underflow %", "overflow %")
    columns = [TableColumn(f"{metric} {name}", rank=rank) for rank, metric in enumerate(metrics) for name in medians]
    worst = listed.sort("relative_error", descending=True, nulls_last=True).head(top)
    by_key = {name: {(r["layer"], r["role"]): r for r in rows.to_dicts()} for name, rows in medians.items()}
    rows = []
    for layer, role in worst.select("layer", "role").rows():
        found = [by_key[name].get((layer, role), {}) for name in medians]
        rows.append((SHOWN_AS[role], layer, *(format_number(row.get(metric)) for metric in _SHOWN for row in found)))
    print_table(make_console(), f"{what}, worst first; medians over all steps", (*TENSOR, *columns), rows)


# --- audit ----------------------------------------------------------------------------------------------------------------


def audit_command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="folder of Megatron, NeMo 2, DCP or safetensors, or a file of torch.save or Lightning"
        ),
    ],
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="only weights whose names match, such as '*.mlp.*'; may be repeated"),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="FP8 recipe for serving, a name or JSON; only its weight format counts")
    ] = "current",
    top: Annotated[int, typer.Option(metavar="N", help="maximum number of weights to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every weight")] = False,
) -> None:
    """Check how much a checkpoint's weights lose in FP8 and BF16, and whether stored scales still fit the weights."""
    with show_progress(f"reading {checkpoint}"):
        found = audit(checkpoint, _parse_recipe(recipe), compile_layer_patterns(layers))
    if as_json:
        print_json(found)
        return
    _print_audit(found, top)
    faulty = any(row["nan"] or row["inf"] or lacks_scale(row) for row in found.rows)
    if faulty:
        print_next_step(make_console(), "save the checkpoint again: weights have NaN, infinity or no scale.")
    else:
        print_next_step(make_console(), command=["audit", str(checkpoint), "--json"])


def _parse_recipe(text: str) -> str | dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return text
    try:
        parsed: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--recipe {text!r} is not valid JSON: {error}") from None
    return parsed


def _print_audit(found: CheckpointAudit, top: int) -> None:
    out, fp8 = make_console(), found.fp8_format.name
    read, *findings = found.verdict()
    for sentence in findings:
        print_text(out, sentence)
    columns = (
        *(TableColumn("weight", "name"), TableColumn("dtype", "text", rank=6), TableColumn("amax", rank=2)),
        *(TableColumn("outliers (log2)", rank=5), TableColumn(f"{fp8} error %"), TableColumn("underflow %", rank=4)),
        *(TableColumn("BF16 error %", rank=3), TableColumn("stored scale", "text"), TableColumn("its ratio (log2)")),
        *(TableColumn("its error %", rank=1), TableColumn("its overflow %", rank=4)),
    )
    rows = []
    for row in found.rows[:top]:
        now, stored = row["fp8_current"], row["fp8_stored"] or {}
        cast = format_number(row["amax"]), format_number(row["outlier_log2"]), _show_error(now)
        lost = format_number(now["underflow_pct"]), _show_error(row["bf16"])
        kept = stored.get("state", ABSENT), format_number(stored.get("scale_ratio_log2")), _show_error(stored)
        rows.append((row["layer"], row["dtype"], *cast, *lost, *kept, format_number(stored.get("overflow_pct"))))
    print_table(out, f"{found.path}: {found.format}, worst first", columns, rows)
    if (left := len(found.rows) - top) > 0:
        print_text(out, f"and {left:,} more; --top {len(found.rows)} prints them")
    print_notes(out, [read])


def _show_error(cast: dict[str, Any]) -> str:
    error = cast.get("relative_error")
    return format_number(None if error is None else 100 * error)
