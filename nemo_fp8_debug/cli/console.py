"""Options that several commands share, and functions that print text, tables, JSON, errors and the next step."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..analysis.formatting import make_jsonable
from ..core.text import ELLIPSIS, PLAINLY, TableColumn, find_terminal_width, format_table, read_width_variable
from ..errors import ConfigError, FP8DebugWarning, RecordError

#: arguments and options that several commands share
Record = Annotated[str, typer.Argument(metavar="RUN", help="folder of the run, or a folder above it, or an fsspec address")]
By = Annotated[str, typer.Option(metavar="step|samples", help="match the runs by step, or by consumed samples")]
Top = Annotated[int, typer.Option(metavar="N", help="maximum number of rows in each table", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
AsWholeJson = Annotated[bool, typer.Option("--json", help="print JSON, with every tensor")]
#: option of commands that read long records
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ray|dask|ADDRESS",
        help="share the work on long records: ray or dask on this machine, or an address such as ray://HOST:10001 or "
        "tcp://HOST:8786",
    ),
]

#: width of text, in columns, if there is no terminal
_NO_TERMINAL = 200
_NEXT = "Next: "


class _Console(Console):
    """A console that escapes control characters and makes no emoji, because records and plans may come from other people."""

    def render_str(self, text: str, **named: Any) -> Text:
        return super().render_str(escape_controls(text), **named | {"emoji": False})


def escape_controls(text: str) -> str:
    """Return a text with escaped control characters, so that a record cannot control the terminal.

    Example:
        >>> escape_controls("fc1\\x1b[2J")
        'fc1\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def make_console(stderr: bool = False) -> Console:
    """Return a console for standard output or standard error. Its width is `COLUMNS`, otherwise the terminal's, otherwise
    200.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors=PLAINLY)
    width = find_terminal_width(sys.stdout, sys.stderr, sys.stdin) or _NO_TERMINAL
    return _Console(stderr=stderr, width=width, color_system="auto" if stream.isatty() else None)


def print_text(out: Console, text: str, style: str = "") -> None:
    """Print a paragraph. Wrap its lines in a terminal or if `COLUMNS` is set. Otherwise print it as one line."""
    out.print(Text(escape_controls(text), style), soft_wrap=_is_file(out))


def _is_file(out: Console) -> bool:
    return not out.is_terminal and read_width_variable() is None


def print_table(
    out: Console, title: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> None:
    """Print a blank line and a table. Print nothing if the table has no rows.

    Args:
        rows: rows of cells, one text for each column.
        styles: the style of each row, or nothing to print all rows without a style.
    """
    if not rows:
        return
    found = format_table(columns, [[escape_controls(cell) for cell in row] for row in rows], out.width)
    out.print()
    print_text(out, f"{title}; {ELLIPSIS} stands for {found.beginning}" if found.beginning else title, "bold")
    _print_lines(out, found.heading, "dim")
    for lines, style in zip(found.rows, styles or [""] * len(rows), strict=True):
        _print_lines(out, lines, style)


def _print_lines(out: Console, lines: Sequence[str], style: str = "") -> None:
    for line in lines:
        out.print(Text(line, style), no_wrap=True, overflow="ignore", crop=False)


def print_notes(out: Console, notes: Sequence[str]) -> None:
    """Print a blank line, then each note as a paragraph."""
    for place, note in enumerate(notes):
        if not place:
            out.print()
        print_text(out, f"note: {note}")


def print_next_step(out: Console, sentence: str = "", command: Sequence[str] = ()) -> None:
    """Print what to do next, as the last paragraph of a command's output.

    Args:
        sentence: what to do.
        command: arguments of `nemo-fp8-debug` that do it. If we break the command into lines, you can still paste it as one
            command.
    """
    sentence = escape_controls(sentence.removeprefix(_NEXT))
    told = escape_controls(shlex.join(["nemo-fp8-debug", *command])) if command else ""
    if _is_file(out):
        lines = list(filter(None, [sentence, told]))
    else:
        wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
        width = out.width - len(_NEXT)
        *broken, last = wrap(told, width - len(" \\")) or [""]
        lines = [*wrap(sentence, width), *(f"{line} \\" for line in broken), *filter(None, [last])]
    out.print()
    _print_lines(out, [f"{' ' * len(_NEXT) if place else _NEXT}{line}" for place, line in enumerate(lines)])


def repeat_option(option: str, values: Sequence[object] | None) -> list[str]:
    """Return the words of an option that may be repeated.

    Example:
        >>> repeat_option("--baseline", ["runs/a", "runs/b"])
        ['--baseline', 'runs/a', '--baseline', 'runs/b']
    """
    return [word for value in values or () for word in (option, str(value))]


def print_json(value: Any) -> None:
    """Print a value as JSON, with one line for each key and for each row of a table."""
    for piece in _json(make_jsonable(value), "\n"):
        sys.stdout.write(piece)
    print()


def _json(value: Any, line: str) -> Iterator[str]:
    """
    Args:
        line: a line break, followed by the indent of the next line.
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
    """Show a progress bar on standard error, if that is a terminal.

    Args:
        phases: descriptions of the phases, in order.

    Yields:
        A function to call at the end of each phase.

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


def print_errors_in_one_line(command: Callable[..., None], status: int) -> Callable[..., None]:
    """Return a command that prints each of our errors and warnings as one line on standard error.

    Args:
        status: exit status after an error.
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
