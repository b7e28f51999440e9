"""`nemo-fp8-debug control RUN`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer

from ..analysis.formatting import jsonable
from ..errors import RecordError
from ..options.control_file import NAME, Control
from ..record.reader import find_run
from ..record.schema import STATUS
from ..record.storage import Storage
from .console import console, print_json, say
from .listing import Column, print_rows

Patterns = list[str] | None

EXAMPLES = (
    "runs/fp8",
    'runs/fp8 --interval 10 --layers "*.layers.3.*" --dump "*.layers.3.*" --steps 5',
    "runs/fp8 --reset",
)


def command(
    run: Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")],
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
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
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
            say(console(), f"wrote {storage.path(NAME)}; the run applies it from its next sampled step on{heard}")
    elif as_json:
        print_json(jsonable(_status(storage)))
    else:
        _show(storage)


def _last_heard_of(storage: Storage) -> str:
    """When the run last wrote its status, in words.

    Raises:
        RecordError: that was when it ended.
    """
    try:
        status = json.loads(storage.read(STATUS))
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


def _status(storage: Storage) -> dict[str, Any]:
    """What the run last wrote of itself.

    Raises:
        RecordError: it has written nothing, or nothing that can be read.
    """
    try:
        status: dict[str, Any] = json.loads(storage.read(STATUS))
        return {**status, "control": dict(status["control"]), "dump": dict(status["dump"])}
    except FileNotFoundError:
        raise RecordError(f"{storage} has no {STATUS}: the run has not sampled yet") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None


def _show(storage: Storage) -> None:
    status = _status(storage)
    control, dump = status["control"], status["dump"]
    shown = {f"control: {k}": v for k, v in control.items() if k not in ("checksum", "written")}
    ended = {"ended": _as_time(status["ended"])} if isinstance(status.get("ended"), float) else {}
    at = "not sampled yet" if status.get("step") is None else f"at step {status['step']}"
    try:
        progress = _progress(dump)
    except (TypeError, ValueError, OverflowError) as error:  # what should be numbers is something else
        raise RecordError(f"{storage.path(STATUS)} cannot be read: {error}") from None
    out = console()
    say(out, f"{storage}, {at}")
    rows = [(key, str(value).strip()) for key, value in {**ended, **shown, **progress}.items()]
    print_rows(out, "Status", (Column("what", "name"), Column("value", "text")), rows, entry=" ".join)


def _progress(dump: dict[str, Any]) -> dict[str, str]:
    def readable(name: str) -> str:
        return f"{float(dump.get(name, 0)) / (1 << 30):.3g} GiB"

    if not dump:
        return {}
    return {
        "dumped": f"{dump.get('tensors', 0)} tensors, {readable('bytes')}; {readable('bytes_waiting')} wait to be written",
        "budget": f"{readable('budget_left_bytes')} left of {readable('budget_bytes')}",
        **{f"left out, {n} tensors": str(why) for why, n in dict(dump.get("left_out") or {}).items()},
    }
