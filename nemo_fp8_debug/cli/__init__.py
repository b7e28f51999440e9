"""The command line, `nemo-fp8-debug COMMAND`: a file a command, imported when asked for; torch takes seconds. Internal."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .._version import __version__
from .console import explained

COMMANDS = ("compare", "diagnose", "gate", "learn", "recommend", "rescue", "control", "replay", "audit", "import")


def _command_named(name: str) -> Any:
    """The function of a command; only its module is imported, since torch takes seconds."""
    match name:
        case "compare":
            from . import compare

            return compare.command
        case "diagnose":
            from . import diagnose

            return diagnose.command
        case "gate":
            from . import gate

            return gate.command
        case "learn":
            from . import learn

            return learn.command
        case "recommend":
            from . import recommend

            return recommend.command
        case "rescue":
            from . import rescue

            return rescue.command
        case "control":
            from . import control

            return control.command
        case "replay":
            from . import replay

            return replay.command
        case "audit":
            from . import audit

            return audit.command
        case "import":
            from . import imports

            return imports.command
    raise KeyError(name)


class _Commands(TyperGroup):
    """Commands by name, each from its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        warnings.filterwarnings("ignore", "The pynvml package", FutureWarning)  # torch's; some commands import it late
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(explained(_command_named(cmd_name), 2 if cmd_name == "gate" else 1))
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
