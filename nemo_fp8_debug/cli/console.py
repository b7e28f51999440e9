"""What all commands share: options, how they print, and how they refuse."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..analysis.formatting import make_jsonable
from ..errors import ConfigError, FP8DebugWarning, RecordError

#: arguments and options of several commands
Record = Annotated[str, typer.Argument(help="the run's record, or a folder above it; any fsspec address")]
By = Annotated[str, typer.Option(metavar="step|samples", help="match the runs by step, or by samples consumed")]
Top = Annotated[int, typer.Option(metavar="N", help="tensors to list", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
AsWholeJson = Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")]
#: of commands that read long records
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ray|dask|ADDRESS",
        help="share the work on long records: ray or dask on this machine, or ray://HOST:10001 or tcp://HOST:8786",
    ),
]

#: columns of a terminal at the least, and if there is no terminal
_NARROWEST, _NO_TERMINAL = 40, 200


class _Console(Console):
    """Names come from records and plans of others: what would steer a terminal is shown instead, and no emoji is made."""

    def render_str(self, text: str, **named: Any) -> Text:
        return super().render_str(escape_controls(text), **named | {"emoji": False})


def escape_controls(text: str) -> str:
    """What would steer a terminal is shown instead.

    Example:
        >>> escape_controls("fc1\\x1b[2J")
        'fc1\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def console(stderr: bool = False) -> Console:
    """Return standard output, or standard error, as wide as `COLUMNS` says, or else the terminal; 200 columns if neither."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(stderr=stderr, width=_width(), color_system="auto" if stream.isatty() else None)


def _columns() -> int | None:
    told = os.environ.get("COLUMNS", "")
    return max(_NARROWEST, int(told)) if told.isdecimal() and int(told) else None


def _width() -> int:
    if (told := _columns()) is not None:
        return told
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns)
    return _NO_TERMINAL


def print_text(out: Console, text: str) -> None:
    """Print prose: wrapped between words in a terminal, a line a paragraph in a file unless `COLUMNS` is set."""
    out.print(Text(escape_controls(text)), soft_wrap=not out.is_terminal and _columns() is None)


def print_json(value: Any) -> None:
    """Print what `make_jsonable` makes of a value, for programs and people: a key a line, and of tables a row a line."""
    for piece in _json(make_jsonable(value), "\n"):
        sys.stdout.write(piece)
    print()


def _json(value: Any, line: str) -> Iterator[str]:
    """
    Args:
        line: what ends one, with the indent of the next.
    """
    inner = f"{line}  "
    if isinstance(value, Mapping) and value:
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{inner}{json.dumps(key)}: "
            yield from _json(item, inner)
        yield f"{line}}}"
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for i, row in enumerate(value):
            yield f"{',' if i else '['}{inner}{json.dumps(row)}"
        yield f"{line}]"
    else:
        yield json.dumps(value)


@contextlib.contextmanager
def show_progress(*phases: str) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal.

    Args:
        phases: what is done, in order.

    Yields:
        a function to call when a phase is over.

    Example:
        >>> with show_progress("reading runs/bad", "comparing") as over:
        ...     over()
        ...     over()
    """
    out = _Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        waiting = iter(escape(phase) for phase in phases)
        task = progress.add_task(next(waiting, ""), total=len(phases))

        def over() -> None:
            progress.update(task, advance=1, description=next(waiting, ""))

        yield over


def explain_errors(command: Callable[..., None], status: int) -> Callable[..., None]:
    """The command with errors and warnings of ours as one line each on standard error.

    Args:
        status: of the exit after an error.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always", FP8DebugWarning)
            warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
            try:
                command(*args, **kwargs)
            except (ConfigError, RecordError) as error:
                _complain("[bold red]error:[/]", str(error))
                raise typer.Exit(status) from None

    return run


def _show_warning(others: Callable[..., None], message: Warning | str, *rest: Any, **named: Any) -> None:
    if isinstance(message, FP8DebugWarning):
        _complain("[bold yellow]warning:[/]", str(message).removeprefix("nemo_fp8_debug: "))
    else:
        others(message, *rest, **named)


def _complain(kind: str, message: str) -> None:
    _Console(stderr=True).print(f"{kind} {escape(message)}", highlight=False, soft_wrap=True)
