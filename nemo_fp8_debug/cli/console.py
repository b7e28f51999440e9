"""What all commands share: how they print, and how they refuse."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..errors import ConfigError, FP8DebugWarning, RecordError


class _Console(Console):
    """Names come from records and plans of others: what would steer a terminal is shown instead, and no emoji is made."""

    def render_str(self, text: str, **named: Any) -> Text:
        shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
        return super().render_str(shown, **named | {"emoji": False})


def console() -> Console:
    """Standard output; wide enough for every column where it is no terminal."""
    result = _Console()
    if not result.is_terminal:
        result.width = max(result.width, 200)
    return result


def explained(command: Callable[..., None], status: int) -> Callable[..., None]:
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
