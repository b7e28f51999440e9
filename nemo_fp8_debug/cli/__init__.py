"""The command line, `nemo-fp8-debug COMMAND`. Commands are imported when asked for. Internal."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from .._version import __version__
from .console import explain_errors

#: the module of each command; we import no other, because torch takes seconds
COMMANDS = {
    "compare": "explain",
    "diagnose": "explain",
    "gate": "healthy",
    "learn": "healthy",
    "recommend": "explain",
    "rescue": "steer",
    "control": "steer",
    "replay": "formats",
    "audit": "formats",
    "import": "records",
    "view": "records",
    "compact": "records",
    "sql": "records",
}


def load_command(name: str) -> tuple[Callable[..., None], Sequence[str]]:
    """Return the function of a command, and examples of the words after its name."""
    module = importlib.import_module(f".{COMMANDS[name]}", __package__)
    return getattr(module, f"{name}_command"), module.EXAMPLES[name]


class _Command(TyperCommand):
    """A command whose help shows what to write, and no Python types."""

    def get_params(self, ctx: Any) -> Any:
        return _hide_types(super().get_params(ctx))


def _hide_types(params: Sequence[Any]) -> Sequence[Any]:
    """Leave types out of the help of flags and arguments, and braces out of the usage."""
    for param in params:
        if param.param_type_name == "argument":
            vars(param).update(display_type_rich=lambda ctx: None, get_usage_pieces=lambda ctx, name=param.metavar: [name])
        elif param.metavar is None and param.is_flag:
            param.metavar = ""
    return params


class _Commands(TyperGroup):
    """Commands by name, each from its module."""

    def get_params(self, ctx: Any) -> Any:
        return _hide_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        # Torch warns; some commands import it late, or in another process.
        warnings.filterwarnings("ignore", "The pynvml package", FutureWarning)
        os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package:FutureWarning")
        command, endings = load_command(cmd_name)
        examples = (escape(f"nemo-fp8-debug {cmd_name} {rest}") for rest in endings)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        # Each example is a paragraph, because Typer joins lines.
        # Typer breaks lines where the docstring does.
        told = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
        epilog = "\n\n".join(["[bold]Examples[/]", *examples])
        make = alone.command(cmd_name, cls=_Command, help=told, epilog=epilog)
        make(explain_errors(command, 2 if cmd_name == "gate" else 1))
        return get_command(alone)


app = typer.Typer(
    cls=_Commands, help="Find out what FP8 does to a training run.", no_args_is_help=True, pretty_exceptions_enable=False
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
    """Find out what FP8 does to a training run."""
