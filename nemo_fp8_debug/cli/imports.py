"""`nemo-fp8-debug import LOGS OUTPUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..record.imports import import_logs


def command(
    logs: Annotated[Path, typer.Argument(help="a log of nvdlfw_inspect or msProbe, or a folder of the logs of one run")],
    output: Annotated[str, typer.Argument(help="folder for the record, or any fsspec address")],
) -> None:
    """Make a record of what another tool logged, for compare and TensorBoard."""
    found = import_logs(logs, output)
    steps = sorted(found.rows)
    print(f"Imported {len(found.files)} {found.tool} {'file' if len(found.files) == 1 else 'files'} into {output}")
    print(f"  steps    {len(steps)}, {steps[0]} to {steps[-1]}")
    print(f"  tensors  {len(found.tensors)}")
    losses = sum("loss" in scalars for scalars in found.steps.values())
    print(f"  metrics  {', '.join(f'{metric} {n}' for metric, n in sorted(found.mapped.items()))}")
    print(f"  losses   {losses or 'none in the logs'}")
    if found.left_out:
        print("Left out")
        for what, n in sorted(found.left_out.items()):
            print(f"  {n:>8}  {what}")
