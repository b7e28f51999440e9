"""How this package speaks up."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)


#: characters of a message at its beginning and its end, if it is longer than both
_FIRST, _LAST = 1200, 400


def one_line(text: str) -> str:
    """A message as one line that a terminal can show, shortened in the middle if a name in it is very long.

    Example:
        >>> one_line("no layer\\x1b[2J of\\nthis name")
        'no layer [2J of this name'
        >>> len(one_line("a" * 10_000))
        1605
    """
    if not text.isprintable():
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _FIRST + _LAST else f"{text[:_FIRST]} ... {text[-_LAST:]}"


class _SaidInOneLine(ValueError):
    """An error for people; names in its message may come from anybody."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class ConfigError(_SaidInOneLine):
    """The user asked for something that cannot be done; says what was wrong and what to do.

    Raised when the configuration is read or the run starts, never after the first training step. A `ValueError`.

    Example:
        >>> from nemo_fp8_debug import Config, ConfigError
        >>> try:
        ...     Config(interval=0)
        ... except ConfigError as error:
        ...     print(error)
        interval is 0; it must be a whole number, at least 1
    """


class RecordError(_SaidInOneLine):
    """A recorded run cannot be read; names the file and says what is wrong with it. A `ValueError`.

    Example:
        >>> from nemo_fp8_debug import RecordError, read_record
        >>> try:
        ...     read_record("runs", "steps")
        ... except RecordError as error:
        ...     print("several" if "3 run records" in str(error) else error)
        several
    """


class FP8DebugWarning(UserWarning):
    """An error of the monitor, or something it cannot see; the run goes on.

    Example:
        >>> import warnings
        >>> from nemo_fp8_debug import FP8DebugWarning
        >>> warnings.simplefilter("ignore", FP8DebugWarning)
    """


def warn(message: str) -> None:
    """Warn; where warnings are turned into errors, log instead: a warning of ours never stops a run."""
    message, heard = one_line(message), _heard.get()
    if heard is not None:
        heard.append(message)
        return
    try:
        warnings.warn(f"nemo_fp8_debug: {message}", FP8DebugWarning, stacklevel=4)
    except FP8DebugWarning:
        logging.getLogger("nemo_fp8_debug").warning(message)


@contextlib.contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """What is warned of inside, in this thread, as a list and not as warnings: for those who show it themselves."""
    heard: list[str] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def is_exception_underway() -> bool:
    """Whether an exception is on its way through the caller, or has ended the program."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
