"""The command line, `nemo-fp8-debug COMMAND`: a file a command, imported when asked for; torch takes seconds. Internal."""

from __future__ import annotations

import os
import warnings
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from .._version import __version__
from .console import explained

COMMANDS = (
    *("compare", "diagnose", "gate", "learn", "recommend", "rescue", "control", "replay", "audit", "import", "view"),
    *("compact", "sql"),
)


def _module_of(name: str) -> Any:
    """The module of a command, with `command` and `EXAMPLES`; it alone is imported, since torch takes seconds."""
    match name:
        case "compare":
            from . import compare

            return compare
        case "diagnose":
            from . import diagnose

            return diagnose
        case "gate":
            from . import gate

            return gate
        case "learn":
            from . import learn

            return learn
        case "recommend":
            from . import recommend

            return recommend
        case "rescue":
            from . import rescue

            return rescue
        case "control":
            from . import control

            return control
        case "replay":
            from . import replay

            return replay
        case "audit":
            from . import audit

            return audit
        case "import":
            from . import imports

            return imports
        case "view":
            from . import view

            return view
        case "compact":
            from . import compact

            return compact
        case "sql":
            from . import sql

            return sql
    raise KeyError(name)


class _Commands(TyperGroup):
    """Commands by name, each from its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        # torch's; some commands import it late, and some in processes of their own
        warnings.filterwarnings("ignore", "The pynvml package", FutureWarning)
        os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package:FutureWarning")
        module = _module_of(cmd_name)
        examples = (escape(f"nemo-fp8-debug {cmd_name} {rest}") for rest in module.EXAMPLES)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        # A paragraph each, as Typer breaks no lines otherwise.
        make = alone.command(cmd_name, epilog="\n\n".join(["[bold]Examples[/]", *examples]))
        make(explained(module.command, 2 if cmd_name == "gate" else 1))
        return get_command(alone)


app = typer.Typer(
    cls=_Commands, help="See what FP8 does to a training run.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nemo-fp8-debug {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """See what FP8 does to a training run."""
