"""The command line: `nemo-fp8-debug COMMAND`; a file a command."""

from __future__ import annotations

from collections.abc import Callable

import typer

from . import audit, compare, control, imports, replay, rescue
from .console import explained

app = typer.Typer(help="See what FP8 does to a training run.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """See what FP8 does to a training run."""


commands: dict[str, Callable[..., None]] = {
    "compare": compare.command,
    "control": control.command,
    "replay": replay.command,
    "rescue": rescue.command,
    "audit": audit.command,
    "import": imports.command,
}
for name, command in commands.items():
    app.command(name)(explained(command))
