"""Parameters of a request: each named, bounded, and given once. Everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BadParameter

#: characters of a name that are taken, and of it that an error repeats
_LONGEST, _SHOWN = 2000, 80
_WHOLE = re.compile(r"[0-9]{1,18}")
#: metrics that are asked for at once
_MOST_METRICS = 16
#: columns of a picture
_MOST_COLUMNS = 2000


@dataclass(frozen=True)
class Parameter:
    """What a parameter has to be."""

    read: Callable[[str, str], Any]
    optional: bool = False


def parsed(given: Iterable[tuple[str, str]], expected: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values by name; None for optional ones that are not given.

    Raises:
        BadParameter: one is missing, unknown, repeated or out of bounds.
    """
    texts: dict[str, str] = {}
    for name, text in given:
        if name not in expected:
            takes = ", ".join(expected) or "none"
            raise BadParameter(f"Parameter {shortened(name)} is not known here; this address takes: {takes}.")
        if name in texts:
            raise BadParameter(f"Parameter {name} is given more than once; give it once.")
        texts[name] = text
    missing = [name for name, parameter in expected.items() if not parameter.optional and name not in texts]
    if missing:
        raise BadParameter(f"Parameter {missing[0]} is missing; add it to the address.")
    return {name: p.read(name, texts[name]) if name in texts else None for name, p in expected.items()}


def shortened(text: str) -> str:
    """For an error: quoted, without what cannot be printed, no longer than a line."""
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(cut)


def text(name: str, value: str) -> str:
    """A name: of a run, a layer, a recipe."""
    if not 0 < len(value) <= _LONGEST:
        raise BadParameter(f"Parameter {name} has {len(value)} characters; give 1 to {_LONGEST}.")
    return value


def step(name: str, value: str) -> int:
    """A training step."""
    if not _WHOLE.fullmatch(value):
        raise BadParameter(f"Parameter {name} is {shortened(value)}; give a step, a whole number of at most 18 digits.")
    return int(value)


def count(name: str, value: str) -> int:
    """How many columns: 1 to 2000."""
    if not _WHOLE.fullmatch(value) or not 0 < int(value) <= _MOST_COLUMNS:
        raise BadParameter(f"Parameter {name} is {shortened(value)}; give a whole number from 1 to {_MOST_COLUMNS}.")
    return int(value)


def one_of(choices: Iterable[str]) -> Callable[[str, str], str]:
    """One of a few words."""
    known = tuple(choices)

    def read(name: str, value: str) -> str:
        if value not in known:
            raise BadParameter(f"Parameter {name} is {shortened(value)}; choose from {', '.join(known)}.")
        return value

    return read


def some_of(choices: Iterable[str]) -> Callable[[str, str], list[str]]:
    """A few words with commas between them."""
    one = one_of(choices)

    def read(name: str, value: str) -> list[str]:
        words = value.split(",", _MOST_METRICS)
        if len(words) > _MOST_METRICS or len(set(words)) < len(words):
            raise BadParameter(f"Parameter {name} lists more than {_MOST_METRICS} names or one twice; leave some out.")
        return [one(name, word) for word in words]

    return read
