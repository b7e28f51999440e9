"""Thin out large answers, so that pictures and pages stay small."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from .heatmap import pack_header_and_array


def thin_series(
    series: Sequence[npt.NDArray[np.float64]], points: int, known: Sequence[npt.NDArray[np.bool_]] = ()
) -> npt.NDArray[np.int64]:
    """Return the indices to keep, ascending: the minimum, maximum and first non-finite value in each of several equal
    intervals.

    Args:
        series: series of equal length N.
        points: largest number of indices to keep.
        known: whether each index has a value, finite or not, bool [N] for each series. By default, all have.
    """
    n = len(series[0])
    if n <= points:
        return np.arange(n)
    buckets = max(1, (points - 2) // (3 * len(series)))
    bounds = np.linspace(0, n, buckets + 1).astype(np.int64)
    kept = {0, n - 1}
    for values, there in zip_longest(series, known):
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            places = np.arange(begin, end) if there is None else begin + np.flatnonzero(there[begin:end])
            kept.update(_extremes(values, places))
    return np.array(sorted(kept))


def _extremes(values: npt.NDArray[np.float64], places: npt.NDArray[np.int64]) -> set[int]:
    is_finite = np.isfinite(values[places])
    finite, lost = places[is_finite], places[~is_finite]
    found = {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])} if len(finite) else set()
    if len(finite) and len(lost):
        found.add(int(lost[0]))
    return found


def choose_evenly_spread_steps(steps: Sequence[int], most: int, always: Iterable[int | None] = ()) -> list[int]:
    """Return at most `most` of some ascending steps, evenly spread. Always keep the ends and the steps nearest to `always`.

    Example:
        >>> choose_evenly_spread_steps(range(0, 100, 10), 3, [42])
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


def thin_columns(answer: Any, most: int) -> Any:
    """Return an answer with at most `most` steps. Keep the extremes of each column.

    Columns are lists next to a list `step`, in the answer or in its nested values.

    Example:
        >>> thin_columns({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.0]}, 2)
        {'step': [0, 2], 'loss': [3.0, 1.0]}
    """
    if not isinstance(answer, dict):
        return answer
    steps = answer.get("step")
    if not isinstance(steps, list) or len(steps) <= most:
        return {name: thin_columns(value, most) for name, value in answer.items()}
    kept = thin_series([_as_floats(column) for column in _columns(answer, len(steps))], most).tolist()
    return _picked(answer, len(steps), kept)


def _picked(value: Any, n: int, kept: list[int]) -> Any:
    if isinstance(value, dict):
        return {name: _picked(one, n, kept) for name, one in value.items()}
    return [value[i] for i in kept] if isinstance(value, list) and len(value) == n else value


def _columns(value: Any, n: int) -> list[list[Any]]:
    """Return all lists of n numbers in a value."""
    if isinstance(value, dict):
        return [column for one in value.values() for column in _columns(one, n)]
    return [value] if isinstance(value, list) and len(value) == n and not any(isinstance(v, str) for v in value) else []


def _as_floats(values: list[Any]) -> Any:
    return np.array([np.nan if value is None else float(value) for value in values])


def shorten_verdict(result: dict[str, Any], most: int) -> tuple[dict[str, Any], list[str]]:
    """Return a verdict with at most `most` rows in each list of its comparison, and with notes about shortened lists."""
    found = result.get("comparison")
    if not found:
        return result, []
    long = {name: len(rows) for name, rows in found.items() if isinstance(rows, list) and len(rows) > most}
    told = [f"The verdict's list of {name.replace('_', ' ')} has the first {most} of {n:,}." for name, n in long.items()]
    return result | {"comparison": found | {name: found[name][:most] for name in long}}, told


def join_metrics_at_steps(answers: Sequence[bytes]) -> bytes:
    """Join answers of `frames` at ascending steps. The result has every tensor that any answer has."""
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
    return pack_header_and_array(header, values)


def _tensors(header: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    rows = zip(*(header[name] for name in ("layer", "role", "kind", "depth")), strict=True)
    return {(row[0], row[1]): row for row in rows}


def _taken_apart(answer: bytes) -> tuple[dict[str, Any], Any]:
    size = int.from_bytes(answer[:4], "little")
    header = json.loads(answer[4 : 4 + size])
    return header, np.frombuffer(answer[4 + size :], "<f4").reshape(len(header["steps"]), len(header["layer"]))
