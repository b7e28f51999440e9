"""`nemo-fp8-debug import LOGS OUTPUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..numerics.metric_names import label_of
from ..record.imports import import_logs
from .console import console, print_json, say, working

EXAMPLES = (
    "logs runs/imported",
    "logs/nvdlfw_inspect_statistics_logs runs/imported --json",
)


def command(
    logs: Annotated[Path, typer.Argument(help="a log of nvdlfw_inspect or msProbe, or a folder of the logs of one run")],
    output: Annotated[str, typer.Argument(help="folder for the record, or any fsspec address")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Make a record of what another tool logged, for compare and TensorBoard."""
    with working(f"reading {logs}"):
        found = import_logs(logs, output)
    steps = sorted(found.rows)
    losses = sum("loss" in scalars for scalars in found.steps.values())
    if as_json:
        counts = {"steps": len(steps), "first": steps[0], "last": steps[-1], "tensors": len(found.tensors), "losses": losses}
        told = {"tool": found.tool, "files": len(found.files), "output": output, **counts}
        print_json({**told, "metrics": dict(found.mapped), "left_out": dict(found.left_out)})
        return
    out = console()
    say(out, f"Imported {len(found.files)} {found.tool} {'file' if len(found.files) == 1 else 'files'} into {output}")
    say(out, f"  steps    {len(steps)}, {steps[0]} to {steps[-1]}")
    say(out, f"  tensors  {len(found.tensors)}")
    say(out, f"  metrics  {', '.join(f'{label_of(metric)} {n}' for metric, n in sorted(found.mapped.items()))}")
    say(out, f"  losses   {losses or 'none in the logs'}")
    if found.left_out:
        say(out, "Left out")
        for what, n in sorted(found.left_out.items()):
            say(out, f"  {n:>8}  {what}")
