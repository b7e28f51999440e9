"""`nemo-fp8-debug audit CHECKPOINT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..analysis.checkpoint.audit import audit
from ..analysis.checkpoint.report import Audit
from ..analysis.formatting import number
from ..core.layer_names import compile_patterns
from ..errors import ConfigError
from .console import console


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="folder of Megatron, NeMo 2 or DCP, safetensors, or a file of torch.save or Lightning")
    ],
    layers: Annotated[
        list[str] | None, typer.Option(help="only weights whose names match this pattern; may be repeated")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="FP8 recipe to serve in, a name or JSON; its format of weights counts")
    ] = "current",
    top: Annotated[int, typer.Option(help="weights to list", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with every weight")] = False,
) -> None:
    """Check a checkpoint's weights: what they lose in FP8 and BF16, and whether stored scales still fit them."""
    found = audit(checkpoint, _recipe(recipe), compile_patterns(layers))
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
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
    out = console()
    table = Table(title=f"{escape(found.path)}: {found.format}, worst first", title_justify="left")
    table.add_column("weight", no_wrap=True)
    table.add_column("dtype")
    fp8 = found.fp8_format.name
    current = ("amax", "outliers (log2)", f"{fp8} error %", "underflow %")
    stored_scale = ("stored scale: ratio (log2)", "error %", "overflow %")
    for heading in (*current, *stored_scale, "BF16 error %"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("stored scale")
    for row in found.rows[:top]:
        now, stored = row["fp8_current"], row["fp8_stored"] or {}
        table.add_row(
            escape(row["layer"]),
            row["dtype"],
            number(row["amax"]),
            number(row["outlier_log2"]),
            _percent(now),
            number(now["underflow_pct"]),
            number(stored.get("scale_ratio_log2")),
            _percent(stored),
            number(stored.get("overflow_pct")),
            _percent(row["bf16"]),
            stored.get("state", "-"),
        )
    out.print(table)
    for sentence in found.verdict():
        out.print(sentence, soft_wrap=True, highlight=False, markup=False)


def _percent(cast: dict[str, Any]) -> str:
    error = cast.get("relative_error")
    return number(None if error is None else 100 * error)
