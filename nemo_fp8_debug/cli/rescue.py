"""`nemo-fp8-debug rescue PLAN -- COMMAND`."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..core.keys import SHOWN_AS
from ..errors import ConfigError, warn
from ..plan.plan import PLAN, TAKEN, Plan
from .console import console

EXAMPLES = ("fix/plan.json -- python train.py --resume checkpoints/step_1000",)


def command(
    plan: Annotated[Path, typer.Argument(help="file of a plan, which `recommend --output` writes")],
    run: Annotated[list[str], typer.Argument(help="after --: the command that resumes the run", metavar="-- COMMAND...")],
) -> None:
    """Resume a failing run under a plan: runs the command that resumes it from a checkpoint before the failure.

    The callbacks of this package in that run apply the plan. The exit status is that of the command.
    """
    changes = Plan.load(plan).changes
    if not changes:
        raise ConfigError(f"{plan} has no changes: the run would go as it went before")
    for change in changes:
        how = change.recipe + (", multiplied in BF16" if change.multiply_in_bf16 else "")
        roles = ", ".join(SHOWN_AS[role] for role in change.roles)
        console().print(f"{escape(change.layer)}: {roles} in {escape(how)}", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken"
        status = _run(run, {PLAN: str(plan.resolve()), TAKEN: str(taken)})
        if not taken.exists():
            warn(
                "no process on this host took the plan up: does the run have FP8DebugCallback, FP8EmulationCallback, "
                "FP8PlanCallback or apply_plan in it?"
            )
    raise typer.Exit(status)


def _run(command: list[str], added: dict[str, str]) -> int:
    """The exit status of a command; it alone answers to signals, as it would without us."""
    try:
        process = subprocess.Popen(command, env=os.environ | added)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from None
    terminate = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, interrupt)
    return status if status >= 0 else 128 - status
