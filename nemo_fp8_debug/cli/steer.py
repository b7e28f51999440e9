"""`nemo-fp8-debug` control and rescue: change what a running job samples, and resume a run with a plan."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.keys import SHOWN_AS
from ..core.text import TableColumn, format_count, format_number
from ..errors import ConfigError, RecordError, warn
from ..options.control_file import NAME, ControlSettings
from ..plan.plan import PLAN, TAKEN, Plan
from ..record.reader import find_record, read_status
from ..record.schema import STATUS
from ..record.storage import FolderStorage
from .console import AsJson, Record, make_console, print_json, print_next_step, print_table, print_text

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
    interval: Annotated[int | None, typer.Option(metavar="STEPS", help="steps between two samples")] = None,
    layers: Annotated[
        Patterns, typer.Option(metavar="PATTERN", help="layers to sample, such as 'layers.3.*'; may be repeated")
    ] = None,
    roles: Annotated[
        Patterns, typer.Option(metavar="ROLE", help="operands to sample: input, weight or grad_output; may be repeated")
    ] = None,
    what_if: Annotated[
        Patterns,
        typer.Option(metavar="RECIPE", help="recipe to try on each sample, e.g. current-e4m3; may be repeated"),
    ] = None,
    dump: Annotated[
        Patterns, typer.Option(metavar="PATTERN", help="layers to dump, such as 'layers.3.*'; may be repeated")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="sample each of the next N steps, and dump only in these steps")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="restore the settings that the run started with")] = False,
    as_json: AsJson = False,
) -> None:
    """Change what a running job samples and dumps, or show what the last change did.

    Without options, you see the last change. A setting that you leave out returns to the value that the run started with.
    The run reads the settings before each sampled step.
    """
    storage = find_record(run)
    given = {"interval": interval, "layers": layers, "roles": roles, "what_if": what_if, "dump": dump}
    wanted = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v}
    if reset or wanted or steps is not None:
        # Parse the settings as the run will parse them, so that mistakes show here.
        control = ControlSettings.parse("" if reset else str(ControlSettings(wanted, steps)))
        last = _tell_last_status(storage)
        _write(storage, str(control))
        if as_json:
            print_json({"wrote": storage.path(NAME), "settings": str(control)})
        else:
            print_text(
                make_console(), f"We wrote {storage.path(NAME)}. The run applies it from its next sampled step on{last}."
            )
            print_next_step(make_console(), command=["control", run])
    elif as_json:
        print_json(_read_status(storage))
    else:
        _print_status(storage)
        print_next_step(make_console(), command=["control", run, "--help"])


def _tell_last_status(storage: FolderStorage) -> str:
    """Return a phrase that says when the run last wrote its status.

    Raises:
        RecordError: the run has ended.
    """
    try:
        status = read_status(storage)
        step = "before its first sample" if status["step"] is None else f"at step {int(status['step'])}"
        time, ended = _as_time(status["time"]), status.get("ended") is not None
    except Exception:  # written by an earlier version, or damaged: the run does not need it
        return ""
    if ended:
        raise RecordError(
            f"the run in {storage} ended on {time}, {step} or later, and applies no more changes; nothing was written. "
            f"To change the run when it is resumed or started again, write {storage.path(NAME)} yourself"
        )
    return f" (its last status is of {time}, {step})"


def _as_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError, TypeError):  # damaged
        return "an unknown day"


def _write(storage: FolderStorage, text: str) -> None:
    try:
        storage.replace_file(NAME, text.encode())
    except Exception as error:  # each driver of a remote file system has its own errors
        raise RecordError(f"{storage.path(NAME)} cannot be written: {error}") from None


def _read_status(storage: FolderStorage) -> dict[str, Any]:
    """Return the status of a run, with its control and dumps.

    Raises:
        RecordError: there is no status, or it cannot be read.
    """
    status = read_status(storage)
    try:
        return {**status, "control": dict(status["control"]), "dump": dict(status["dump"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None


def _print_status(storage: FolderStorage) -> None:
    status = _read_status(storage)
    control, dump = status["control"], status["dump"]
    shown = {f"control: {k}": v for k, v in control.items() if k not in ("checksum", "written")}
    ended = {"ended": _as_time(status["ended"])} if isinstance(status.get("ended"), float) else {}
    at = "not sampled yet" if status.get("step") is None else f"at step {status['step']}"
    try:
        progress = _tell_progress(dump)
    except (TypeError, ValueError, OverflowError) as error:  # not numbers
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None
    out = make_console()
    print_text(out, f"The run in {storage} has {'ended' if ended else 'not ended'}, {at}.")
    rows = [(key, str(value).strip()) for key, value in {**ended, **shown, **progress}.items()]
    print_table(out, "Status", (TableColumn("what", "text"), TableColumn("value", "text")), rows)


def _tell_progress(dump: dict[str, Any]) -> dict[str, str]:
    def readable(name: str) -> str:
        return format_number(float(dump.get(name, 0)) / (1 << 30), " GiB")

    if not dump:
        return {}
    return {
        "dumped": f"{dump.get('tensors', 0)} tensors, {readable('bytes')}; {readable('bytes_waiting')} are being written",
        "budget": f"{readable('budget_left_bytes')} left of {readable('budget_bytes')}",
        **{f"left out, {n} tensors": str(why) for why, n in dict(dump.get("left_out") or {}).items()},
    }


# --- rescue ---------------------------------------------------------------------------------------------------------------


def rescue_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan file, written by `recommend --output`")],
    run: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="the command that resumes the run")],
) -> None:
    """Run a resume command with a plan applied.

    The command must resume from a checkpoint before the failure. This package's callbacks in the resumed run apply the plan.
    The exit status is that of the command.
    """
    changes = Plan.load(plan).changes
    if not changes:
        raise ConfigError(f"{plan} has no changes, so the run would not differ")
    out = make_console()
    print_text(out, f"We run the command with {format_count(len(changes), 'change')} of {plan} applied.")
    columns = (TableColumn("layer", "name"), TableColumn("tensors", "text"), TableColumn("recipe", "text"))
    rows = []
    for change in changes:
        how = change.recipe + (", multiplied in BF16" if change.multiply_in_bf16 else "")
        rows.append((change.layer, ", ".join(SHOWN_AS[role] for role in change.roles), how))
    print_table(out, "Changes", columns, rows)
    out.print()
    out.file.flush()
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken"
        status = _run_command(run, {PLAN: str(plan.resolve()), TAKEN: str(taken)})
        is_applied = taken.exists()
        if not is_applied:
            warn(
                "no process on this host applied the plan: the run needs FP8DebugCallback, FP8EmulationCallback, "
                "FP8PlanCallback or apply_plan"
            )
    if status:
        then = f"the command ended with status {status}; read its last lines."
    elif is_applied:
        then = (
            "nemo-fp8-debug compare RUN --baseline GOOD shows whether the plan helped. RUN is the folder of the resumed run."
        )
    else:
        then = "add FP8PlanCallback to the run and start it again, unless all its processes run on other hosts."
    print_next_step(out, then)
    raise typer.Exit(status)


def _run_command(command: list[str], added: dict[str, str]) -> int:
    """Run a command and return its exit status. Signals end only the command, as if it ran without us."""
    try:
        process = subprocess.Popen(command, env=os.environ | added)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
    terminate = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, interrupt)
    return status if status >= 0 else 128 - status
