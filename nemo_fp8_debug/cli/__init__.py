"""The command line: `nemo-fp8-debug COMMAND`; a file a command, imported when it is asked for: torch takes seconds."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .console import explained

#: commands, and the modules that have them
COMMANDS = {
    "compare": "compare",
    "diagnose": "diagnose",
    "recommend": "recommend",
    "rescue": "rescue",
    "control": "control",
    "replay": "replay",
    "audit": "audit",
    "import": "imports",
}


class _Commands(TyperGroup):
    """Commands by name, each from its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        warnings.filterwarnings("ignore", "The pynvml package", FutureWarning)  # torch's; some commands import it late
        module = importlib.import_module(f".{COMMANDS[cmd_name]}", __name__)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(explained(module.command))
        return get_command(alone)


app = typer.Typer(
    cls=_Commands, help="See what FP8 does to a training run.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def main() -> None:
    """See what FP8 does to a training run."""
