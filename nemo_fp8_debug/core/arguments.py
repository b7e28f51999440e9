"""Check the arguments of public functions in one place, so that users get a `ConfigError` and not a TypeError."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, get_type_hints

from ..errors import ConfigError

C = TypeVar("C", bound=type)
#: number of names that a message lists
_FIRST = 6
_OF_SIGNATURE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def reject_unknown_arguments(options_of: Callable[..., Any] | None = None) -> Callable[[C], C]:
    """Return a class decorator. For an unknown argument, the constructor raises `ConfigError` and lists the valid ones.

        @check_arguments()
        class Callback:
            def __init__(self, interval: int = 100) -> None: ...

        Callback(intervall=5)  # ConfigError: there is no option 'intervall' (did you mean 'interval'?); ...

    Args:
        options_of: the class that receives the constructor's `**options`. Its options then show in the constructor's
            signature, with their types, so that launchers and command lines (NeMo-Run, LightningCLI) can offer them.
    """

    def decorated(cls: C) -> C:
        original = cls.__init__  # type: ignore[misc]
        signature = _signature(original, options_of)

        @functools.wraps(original)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                known = [name for name in signature.parameters if name != "self"]
                raise ConfigError(_explained(error, [name for name in kwargs if name not in known], known)) from None
            original(self, *args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__annotations__ = {
            p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty
        }
        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorated


def _signature(original: Callable[..., None], options_of: Callable[..., Any] | None) -> inspect.Signature:
    signature = inspect.signature(original)
    if options_of is None:
        return signature
    own = [p for p in signature.parameters.values() if p.kind not in _OF_SIGNATURE]
    names, types = {p.name for p in own}, get_type_hints(options_of)
    more = [p for p in inspect.signature(options_of).parameters.values() if p.name not in names]
    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[p.name]) for p in more]
    return signature.replace(parameters=[*own, *options])


def _explained(error: TypeError, unknown: Sequence[str], known: Sequence[str]) -> str:
    if unknown:
        return f"there is no option {unknown[0]!r}{suggest_name(unknown[0], known)}; the options are {', '.join(known)}"
    return f"{error}; the arguments are {', '.join(known)}, and options must be passed by name, such as interval=100"


def format_value(value: Any) -> str:
    """Return a value as text for a message, on one line, and shortened if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:60]} ... ({type(value).__name__})"


def quote_names(names: Sequence[str]) -> str:
    """Return the first names for a message, in quotes because a layer may be called 0.

    Example:
        >>> quote_names(["0", "2"]), quote_names("abcdefgh")
        ("'0', '2'", "'a', 'b', 'c', 'd', 'e', 'f' and 2 more")
    """
    rest = len(names) - _FIRST
    return ", ".join(map(repr, names[:_FIRST])) + (f" and {rest} more" if rest > 0 else "")


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a question with the closest known name, to append to an unknown name, or "" if no known name is close."""
    found = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check_whole_number(value: Any) -> int | None:
    """Return a Python, NumPy or torch number as an int, or None if it is a bool or not a single whole number."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except Exception:  # several elements, or an element that cannot be read
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return int(number) if isinstance(number, int) or number.is_integer() else None


def check_number(name: str, value: Any, least: int) -> int:
    """Return the value of an option as a whole number.

    Raises:
        ConfigError: the value is not a whole number, or is less than `least`.
    """
    number = check_whole_number(value)
    if number is None or number < least:
        raise ConfigError(f"{name} is {format_value(value)}; it must be a whole number, at least {least}")
    return number


def check_strings(name: str, value: Any) -> None:
    """Raise an error unless the value is a list of strings.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or any(not isinstance(v, str) for v in value):
        meant = f", as [{format_value(value)}]" if isinstance(value, str) else ""
        raise ConfigError(f"{name} is {format_value(value)}; it takes a list of strings{meant}")


def check_choices(name: str, values: Collection[str], known: Collection[str]) -> None:
    """Raise an error if the list is empty or has an unknown value.

    Raises:
        ConfigError: the list is empty, or a value is unknown.
    """
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        meant = suggest_name(unknown[0], known) if unknown else ""
        raise ConfigError(f"unknown {name} {unknown}{meant}; choose from {', '.join(known)}")
