"""The command line, `nemo-fp8-debug COMMAND`. Each command is imported only when it is used. Internal."""

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
from .console import print_errors_in_one_line

#: the module of each command; we import only the module of the command in use, because importing torch takes seconds
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
    """Return a command's function, and examples of its arguments."""
    module = importlib.import_module(f".{COMMANDS[name]}", __package__)
    return getattr(module, f"{name}_command"), module.EXAMPLES[name]


class _Command(TyperCommand):
    """A command whose help shows no Python types."""

    def get_params(self, ctx: Any) -> Any:
        return _hide_types(super().get_params(ctx))


def _hide_types(params: Sequence[Any]) -> Sequence[Any]:
    """Remove types from the help of flags and arguments, and braces from the usage. Return the parameters."""
    for param in params:
        if param.param_type_name == "argument":
            vars(param).update(display_type_rich=lambda ctx: None, get_usage_pieces=lambda ctx, name=param.metavar: [name])
        elif param.metavar is None and param.is_flag:
            param.metavar = ""
    return params


class _Commands(TyperGroup):
    """The group of all commands. It imports a command's module when the command is used."""

    def get_params(self, ctx: Any) -> Any:
        return _hide_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        # Hide a warning of torch, which some commands import late or in another process.
        warnings.filterwarnings("ignore", "The pynvml package", FutureWarning)
        os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package:FutureWarning")
        command, endings = load_command(cmd_name)
        examples = (escape(f"nemo-fp8-debug {cmd_name} {rest}") for rest in endings)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        # Each example in the epilog is a paragraph, because Typer joins the lines of the epilog.
        # In the help, Typer keeps the docstring's line breaks, so join the lines of each paragraph.
        told = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
        epilog = "\n\n".join(["[bold]Examples[/]", *examples])
        make = alone.command(cmd_name, cls=_Command, help=told, epilog=epilog)
        make(print_errors_in_one_line(command, 2 if cmd_name == "gate" else 1))
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
