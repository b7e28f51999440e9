"""Exceptions and warnings of this package."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)


#: numbers of characters that we keep at the beginning and at the end of a message that is longer than their sum
_FIRST, _LAST = 1200, 400


def one_line(text: str) -> str:
    """Return a message as one line that a terminal can show. Shorten a very long message in the middle.

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
    """An error with a one-line message, because names in the message may contain line breaks or control characters."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class ConfigError(_SaidInOneLine):
    """The user's configuration cannot be used. The message says what is wrong and what to do.

    This error is raised when the configuration is read or the run starts, never after the first training step. It is a
    `ValueError`.

    Example:
        >>> from nemo_fp8_debug import Config, ConfigError
        >>> try:
        ...     Config(interval=0)
        ... except ConfigError as error:
        ...     print(error)
        interval is 0; it must be a whole number, at least 1
    """


class RecordError(_SaidInOneLine):
    """A recorded run cannot be read. The message names the file and the problem. This error is a `ValueError`.

    Example:
        >>> from nemo_fp8_debug import RecordError, read_record
        >>> try:
        ...     read_record("runs", "steps")
        ... except RecordError as error:
        ...     print("several" if "3 run records" in str(error) else error)
        several
    """


class FP8DebugWarning(UserWarning):
    """The monitor had an error, or cannot observe part of the run. The run continues.

    Example:
        >>> import warnings
        >>> from nemo_fp8_debug import FP8DebugWarning
        >>> warnings.simplefilter("ignore", FP8DebugWarning)
    """


def warn(message: str) -> None:
    """Show a warning. If Python turns warnings into errors, log the message instead, so that it never stops a run."""
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
    """Collect this thread's warnings in a list instead of showing them. The caller shows them later."""
    heard: list[str] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def is_exception_underway() -> bool:
    """Return whether the caller runs while an exception is handled, or an exception has ended the program."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
