"""`nemo-fp8-debug audit CHECKPOINT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..analysis.checkpoint.audit import audit
from ..analysis.checkpoint.report import Audit
from ..analysis.formatting import number
from ..core.layer_names import compile_patterns
from ..errors import ConfigError
from .console import console, print_json, say, working
from .listing import Column, print_rows

EXAMPLES = (
    "checkpoints/step_1000",
    'checkpoints/step_1000 --layers "*.mlp.*" --json',
)


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="folder of Megatron, NeMo 2 or DCP, safetensors, or a file of torch.save or Lightning")
    ],
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="only weights whose names match this pattern; may be repeated"),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="FP8 recipe to serve in, a name or JSON; its format of weights counts")
    ] = "current",
    top: Annotated[int, typer.Option(metavar="N", help="weights to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every weight")] = False,
) -> None:
    """Check a checkpoint's weights: what they lose in FP8 and BF16, and whether stored scales still fit them."""
    with working(f"reading {checkpoint}"):
        found = audit(checkpoint, _recipe(recipe), compile_patterns(layers))
    if as_json:
        print_json(found.to_json())
    else:
        _print(found, top)


def _recipe(text: str) -> str | dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return text
    try:
        parsed: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--recipe {text!r} is not valid JSON: {error}") from None
    return parsed


def _print(found: Audit, top: int) -> None:
    out, fp8 = console(), found.fp8_format.name
    headings = (
        "amax",
        "outliers (log2)",
        f"{fp8} error %",
        "underflow %",
        "stored scale: ratio (log2)",
        "error %",
        "overflow %",
    )
    columns = (
        *(Column("weight", "name"), Column("dtype", "text")),
        *(*map(Column, headings), Column("BF16 error %"), Column("stored scale", "text")),
    )
    rows = []
    for row in found.rows[:top]:
        now, stored = row["fp8_current"], row["fp8_stored"] or {}
        cast = number(row["amax"]), number(row["outlier_log2"]), _percent(now), number(now["underflow_pct"])
        kept = number(stored.get("scale_ratio_log2")), _percent(stored), number(stored.get("overflow_pct"))
        rows.append((row["layer"], row["dtype"], *cast, *kept, _percent(row["bf16"]), stored.get("state", "-")))
    print_rows(out, f"{found.path}: {found.format}, worst first", columns, rows, entry=" ".join)
    for sentence in found.verdict():
        say(out, sentence)


def _percent(cast: dict[str, Any]) -> str:
    error = cast.get("relative_error")
    return number(None if error is None else 100 * error)
