"""Requests and answers: refusals, parameters, JSON, and addresses of the tab."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np


class Refused(Exception):
    """A request that is not answered; its text says what was wrong, with what, and what to do."""

    status = 400


class BadParameter(Refused):
    """A parameter is missing, unknown, repeated or out of bounds."""


class Foreign(Refused):
    """The request comes from another site."""

    status = 403


class NotThere(Refused):
    """There is no such run, tensor or step."""

    status = 404


class NotReadable(Refused):
    """The record is there and cannot be read."""

    status = 409


def list_numbers(values: Any) -> list[float | None]:
    """Return float64 [N] as a list, null where it is not finite."""
    values = np.asarray(values, np.float64)
    listed = values.tolist()
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        listed[i] = None
    return listed  # type: ignore[no-any-return]


def encode_json(answer: Any) -> str:
    """Return the text of an answer that `jsonable` or `list_numbers` went over."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":"))


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


def parse_parameters(given: Iterable[tuple[str, str]], expected: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return values by name; None for optional ones that are not given.

    Raises:
        BadParameter: one is missing, unknown, repeated or out of bounds.
    """
    texts: dict[str, str] = {}
    for name, text in given:
        if name not in expected:
            takes = ", ".join(expected) or "none"
            raise BadParameter(f"Parameter {quote_text(name)} is not known here; this address takes: {takes}.")
        if name in texts:
            raise BadParameter(f"Parameter {name} is given more than once; give it once.")
        texts[name] = text
    missing = [name for name, parameter in expected.items() if not parameter.optional and name not in texts]
    if missing:
        raise BadParameter(f"Parameter {missing[0]} is missing; add it to the address.")
    return {name: p.read(name, texts[name]) if name in texts else None for name, p in expected.items()}


def quote_text(text: str) -> str:
    """Return a text for an error: quoted, without what cannot be printed, no longer than a line."""
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(cut)


def read_text(name: str, value: str) -> str:
    """Read a name: of a run, a layer, a recipe."""
    if not 0 < len(value) <= _LONGEST:
        raise BadParameter(f"Parameter {name} has {len(value)} characters; give 1 to {_LONGEST}.")
    return value


def read_step(name: str, value: str) -> int:
    """Read a training step."""
    if not _WHOLE.fullmatch(value):
        raise BadParameter(f"Parameter {name} is {quote_text(value)}; give a step, a whole number of at most 18 digits.")
    return int(value)


def read_count(name: str, value: str) -> int:
    """Read how many columns: 1 to 2000."""
    if not _WHOLE.fullmatch(value) or not 0 < int(value) <= _MOST_COLUMNS:
        raise BadParameter(f"Parameter {name} is {quote_text(value)}; give a whole number from 1 to {_MOST_COLUMNS}.")
    return int(value)


def read_one_of(choices: Iterable[str]) -> Callable[[str, str], str]:
    """Return what reads one of a few words."""
    known = tuple(choices)

    def read(name: str, value: str) -> str:
        if value not in known:
            raise BadParameter(f"Parameter {name} is {quote_text(value)}; choose from {', '.join(known)}.")
        return value

    return read


def read_some_of(choices: Iterable[str]) -> Callable[[str, str], list[str]]:
    """Return what reads a few words with commas between them."""
    one = read_one_of(choices)

    def read(name: str, value: str) -> list[str]:
        words = value.split(",", _MOST_METRICS)
        if len(words) > _MOST_METRICS or len(set(words)) < len(words):
            raise BadParameter(f"Parameter {name} lists more than {_MOST_METRICS} names or one twice; leave some out.")
        return [one(name, word) for word in words]

    return read


@dataclass(frozen=True)
class Route:
    """An address, what it takes, and what answers."""

    answer: Callable[..., Any]
    parameters: Mapping[str, Parameter]

    def answer_query(self, given: Iterable[tuple[str, str]]) -> Any:
        """Return the answer to a request with these parameters: bytes, or what JSON can say.

        Raises:
            Refused: a parameter is wrong, or there is no such run, tensor or step.
        """
        return self.answer(**parse_parameters(given, self.parameters))


def link(address: str = "http://localhost:6006", **state: object) -> str:
    """Return the address that shows a state of the tab.

    Args:
        address: of TensorBoard.
        state: `view` (verdict, course, map, timeline, distribution, what_if, runs, fingerprints), `run`, `baseline` and
            `reference` (names of runs as the tab has them), `metric`, `step`, `layer`, `role`; what is None is left out.
    """
    kept = [f"p.fp8.{key}={quote(str(value), safe='')}" for key, value in state.items() if value is not None]
    return "&".join([f"{address.rstrip('/')}/#fp8", *kept])
