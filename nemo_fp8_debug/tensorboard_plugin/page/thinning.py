"""Less of large answers, so that a page stays small; what is left out is said with figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..records.losses import thinned
from ..records.tables import packed


def spread(steps: Sequence[int], most: int, always: Iterable[int | None] = ()) -> list[int]:
    """At most `most` of ascending steps, evenly spread, the ends and those nearest to `always` among them.

    Example:
        >>> spread(range(0, 100, 10), 3, [42])
        [0, 40, 90]
    """
    if len(steps) <= most:
        return list(steps)
    all_steps = np.asarray(steps)
    wanted = {int(all_steps[np.argmin(np.abs(all_steps - step))]) for step in always if step is not None}
    for count in range(most, 0, -1):
        even = {int(all_steps[at]) for at in np.linspace(0, len(steps) - 1, count).round().astype(int)}
        if len(even | wanted) <= most:
            return sorted(even | wanted)
    return sorted(wanted)[:most]


def of_columns(answer: Any, most: int) -> Any:
    """An answer, or what is in it, whose columns are lists beside `step`, with at most so many steps: of each number the
    extremes are among them.

    Example:
        >>> of_columns({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.0]}, 2)
        {'step': [0, 2], 'loss': [3.0, 1.0]}
    """
    if not isinstance(answer, dict):
        return answer
    steps = answer.get("step")
    if not isinstance(steps, list) or len(steps) <= most:
        return {name: of_columns(value, most) for name, value in answer.items()}
    kept = thinned([_as_floats(column) for column in _columns(answer, len(steps))], most).tolist()
    return _picked(answer, len(steps), kept)


def _picked(value: Any, n: int, kept: list[int]) -> Any:
    if isinstance(value, dict):
        return {name: _picked(one, n, kept) for name, one in value.items()}
    return [value[i] for i in kept] if isinstance(value, list) and len(value) == n else value


def _columns(value: Any, n: int) -> list[list[Any]]:
    """Lists of n numbers."""
    if isinstance(value, dict):
        return [column for one in value.values() for column in _columns(one, n)]
    return [value] if isinstance(value, list) and len(value) == n and not any(isinstance(v, str) for v in value) else []


def _as_floats(values: list[Any]) -> Any:
    return np.array([np.nan if value is None else float(value) for value in values])


def of_verdict(result: dict[str, Any], most: int) -> tuple[dict[str, Any], list[str]]:
    """A verdict with at most so many rows in each list of its comparison, and what is left out, told with figures."""
    found = result.get("comparison")
    if not found:
        return result, []
    long = {name: len(rows) for name, rows in found.items() if isinstance(rows, list) and len(rows) > most}
    told = [f"The verdict's list of {name.replace('_', ' ')} has the first {most} of {n:,}." for name, n in long.items()]
    return result | {"comparison": found | {name: found[name][:most] for name in long}}, told


def joined(answers: Sequence[bytes]) -> bytes:
    """Answers of `frames` at ascending steps as one: of all tensors that any of them has."""
    if len(answers) == 1:
        return answers[0]
    headers, tables = zip(*map(_taken_apart, answers), strict=True)
    about = {key: row for header in headers for key, row in _tensors(header).items()}
    places = {key: i for i, key in enumerate(about)}
    values = np.full((sum(map(len, tables)), len(about)), np.nan, "<f4")
    row = 0
    for header, table in zip(headers, tables, strict=True):
        values[row : row + len(table), [places[key] for key in _tensors(header)]] = table
        row += len(table)
    columns = [list(column) for column in zip(*about.values(), strict=True)] or [[], [], [], []]
    steps = [step for header in headers for step in header["steps"]]
    header = headers[0] | {"steps": steps} | dict(zip(("layer", "role", "kind", "depth"), columns, strict=True))
    return packed(header, values)


def _tensors(header: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    rows = zip(*(header[name] for name in ("layer", "role", "kind", "depth")), strict=True)
    return {(row[0], row[1]): row for row in rows}


def _taken_apart(answer: bytes) -> tuple[dict[str, Any], Any]:
    size = int.from_bytes(answer[:4], "little")
    header = json.loads(answer[4 : 4 + size])
    return header, np.frombuffer(answer[4 + size :], "<f4").reshape(len(header["steps"]), len(header["layer"]))
