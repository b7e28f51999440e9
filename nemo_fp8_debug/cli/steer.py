"""`nemo-fp8-debug` control and rescue: change a run while it goes on, and resume it under a plan."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..core.keys import SHOWN_AS
from ..errors import ConfigError, RecordError, warn
from ..options.control_file import NAME, Control
from ..plan.plan import PLAN, TAKEN, Plan
from ..record.reader import find_run, read_status
from ..record.schema import STATUS
from ..record.storage import Storage
from .console import AsJson, Record, console, print_json, print_text
from .listing import Column, print_rows

EXAMPLES = {
    "control": (
        "runs/fp8",
        'runs/fp8 --interval 10 --layers "*.layers.3.*" --dump "*.layers.3.*" --steps 5',
        "runs/fp8 --reset",
    ),
    "rescue": ("fix/plan.json -- python train.py --resume checkpoints/step_1000",),
}


Patterns = list[str] | None


# --- control --------------------------------------------------------------------------------------------------------------


def control_command(
    run: Record,
    interval: Annotated[int | None, typer.Option(metavar="STEPS", help="sampling interval in steps")] = None,
    layers: Annotated[
        Patterns, typer.Option(metavar="PATTERN", help="layers to sample, such as 'layers.3.*'; may be repeated")
    ] = None,
    roles: Annotated[
        Patterns, typer.Option(metavar="ROLE", help="operands to sample: input, weight or grad_output; may be repeated")
    ] = None,
    what_if: Annotated[
        Patterns, typer.Option(metavar="RECIPE", help="a what-if recipe, such as 'current-e4m3'; may be repeated")
    ] = None,
    dump: Annotated[
        Patterns, typer.Option(metavar="PATTERN", help="layers to dump, such as 'layers.3.*'; may be repeated")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="sample each of so many steps, and dump only in these")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="go back to the settings that the run was started with")] = False,
    as_json: AsJson = False,
) -> None:
    """Change what a run samples and dumps while it goes on; without options, show what the last change did.

    A setting that is not given is as the run was started with. The run reads the settings before each sampled step.
    """
    storage = find_run(run)
    given = {"interval": interval, "layers": layers, "roles": roles, "what_if": what_if, "dump": dump}
    wanted = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v}
    if reset or wanted or steps is not None:
        # Read back as the run will read it, so that it is refused here and not there.
        control = Control.parse("" if reset else str(Control(wanted, steps)))
        heard = _last_heard_of(storage)
        _write(storage, str(control))
        if as_json:
            print_json({"wrote": storage.path(NAME), "settings": str(control)})
        else:
            print_text(console(), f"wrote {storage.path(NAME)}; the run applies it from its next sampled step on{heard}")
    elif as_json:
        print_json(_read_status(storage))
    else:
        _print_status(storage)


def _last_heard_of(storage: Storage) -> str:
    """When the run last wrote its status, in words.

    Raises:
        RecordError: that was when it ended.
    """
    try:
        status = read_status(storage)
        step = "before its first sample" if status["step"] is None else f"at step {int(status['step'])}"
        time, ended = _as_time(status["time"]), status.get("ended") is not None
    except Exception:  # an earlier version's, or damaged: the run itself can do without
        return ""
    if ended:
        raise RecordError(
            f"the run in {storage} ended on {time}, {step} or later, and applies no more changes; nothing was written. "
            f"To have it hold when the run is resumed or started again, write {storage.path(NAME)} yourself"
        )
    return f" (last heard of on {time}, {step})"


def _as_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError, TypeError):  # it is damaged
        return "an unknown day"


def _write(storage: Storage, text: str) -> None:
    try:
        storage.write(NAME, text.encode())
    except Exception as error:  # every driver of a remote file system has errors of its own
        raise RecordError(f"{storage.path(NAME)} cannot be written: {error}") from None


def _read_status(storage: Storage) -> dict[str, Any]:
    """Return the status of a run, with its control and dumps.

    Raises:
        RecordError: there is none, or none that can be read.
    """
    status = read_status(storage)
    try:
        return {**status, "control": dict(status["control"]), "dump": dict(status["dump"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None


def _print_status(storage: Storage) -> None:
    status = _read_status(storage)
    control, dump = status["control"], status["dump"]
    shown = {f"control: {k}": v for k, v in control.items() if k not in ("checksum", "written")}
    ended = {"ended": _as_time(status["ended"])} if isinstance(status.get("ended"), float) else {}
    at = "not sampled yet" if status.get("step") is None else f"at step {status['step']}"
    try:
        progress = _tell_progress(dump)
    except (TypeError, ValueError, OverflowError) as error:  # what should be numbers is something else
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None
    out = console()
    print_text(out, f"{storage}, {at}")
    rows = [(key, str(value).strip()) for key, value in {**ended, **shown, **progress}.items()]
    print_rows(out, "Status", (Column("what", "name"), Column("value", "text")), rows, entry=" ".join)


def _tell_progress(dump: dict[str, Any]) -> dict[str, str]:
    def readable(name: str) -> str:
        return f"{float(dump.get(name, 0)) / (1 << 30):.3g} GiB"

    if not dump:
        return {}
    return {
        "dumped": f"{dump.get('tensors', 0)} tensors, {readable('bytes')}; {readable('bytes_waiting')} wait to be written",
        "budget": f"{readable('budget_left_bytes')} left of {readable('budget_bytes')}",
        **{f"left out, {n} tensors": str(why) for why, n in dict(dump.get("left_out") or {}).items()},
    }


# --- rescue ---------------------------------------------------------------------------------------------------------------


def rescue_command(
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
        status = _run_command(run, {PLAN: str(plan.resolve()), TAKEN: str(taken)})
        if not taken.exists():
            warn(
                "no process on this host took the plan up: does the run have FP8DebugCallback, FP8EmulationCallback, "
                "FP8PlanCallback or apply_plan in it?"
            )
    raise typer.Exit(status)


def _run_command(command: list[str], added: dict[str, str]) -> int:
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
