"""The command line: `nemo-fp8-debug COMMAND`; a file a command."""

from __future__ import annotations

import typer

from . import compare
from .console import explained

app = typer.Typer(help="See what FP8 does to a training run.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """See what FP8 does to a training run."""


for name, command in {"compare": compare.command}.items():
    app.command(name)(explained(command))
