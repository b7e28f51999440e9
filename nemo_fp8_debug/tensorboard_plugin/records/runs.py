"""What is known of each record: whether it grows, from when to when it was sampled, whether it can be read."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from ...errors import hearing
from ...record.reader import read_fingerprint
from ...record.schema import STATUS, attempt_of_fingerprint
from ...record.storage import Storage
from .logdir import Logdir
from .part_matrices import Index, Parts

#: a record grows while its newest part is younger than so many seconds, or so many times what usually passes between samples
_YOUNG, _USUAL = 120.0, 3.0
#: seconds for which runs are read to answer what they are
_PATIENCE = 1.0


def listed(parts: Parts, logdir: Logdir) -> list[dict[str, Any]]:
    """All runs by name; those that cannot be read in time as their files are called."""
    until = time.monotonic() + _PATIENCE
    names = sorted(logdir.found().records)
    return [about(parts, name, logdir, in_haste=time.monotonic() > until) for name in names]


#: what names of runs say of the parts that they play
_PLAYS = {
    "baseline": re.compile(r"(^|[\W_])(good|baseline)([\W_]|$)", re.IGNORECASE),
    "reference": re.compile(r"(^|[\W_])(reference|bf16)([\W_]|$)", re.IGNORECASE),
    "run": re.compile(r"(^|[\W_])bad([\W_]|$)", re.IGNORECASE),
}


def suggested(names: Sequence[str]) -> dict[str, str | None]:
    """Which of the runs plays which part, by their names.

    Example:
        >>> suggested(["bad", "baseline", "bf16", "other"])
        {'baseline': 'baseline', 'reference': 'bf16', 'run': 'bad'}
    """
    found = {part: next((name for name in names if pattern.search(name)), None) for part, pattern in _PLAYS.items()}
    others = [name for name in names if name not in (found["baseline"], found["reference"])]
    return found | {"run": found["run"] or next(iter([*others, *names]), None)}


def about(parts: Parts, name: str, logdir: Logdir, in_haste: bool) -> dict[str, Any]:
    """A line of the list of runs, which no run makes fail.

    Args:
        in_haste: only the names of parts are looked at, where they were not read before; samples are not counted then.
    """
    nothing = {"first": None, "last": None, "samples": 0, "updated": None, "version": ""}
    try:
        run = logdir.record(name)
        with hearing():
            read_fingerprint(run)
        index = parts.glance(run) if in_haste else parts.index(run)
        updated = _updated(run, index)
        state = _state(run, index, updated)
    except Exception as error:  # every driver of a remote file system has errors of its own
        return {"name": name, "state": "unreadable", **nothing, "why": str(error) or type(error).__name__}
    counted = len(index.steps) if index.version else None
    known: dict[str, Any] = {"samples": counted, "updated": updated, "version": index.version}
    if not len(index.steps):
        why = f"No part of its metrics can be read: {next(iter(index.damaged.values()))}" if index.damaged else None
        return {"name": name, "state": "unreadable" if why else "empty", **nothing, **known, "why": why}
    ends = {"first": int(index.steps[0]), "last": int(index.steps[-1])}
    return {"name": name, "state": state, **ends, **known, "why": None}


def _updated(run: Storage, index: Index) -> float | None:
    """When the newest part was written."""
    # One that is not there was merged since: just now.
    return None if index.newest is None else _written(run, f"metrics/{index.newest.name}", time.time())


def _written(run: Storage, name: str, otherwise: float | None = None) -> float | None:
    """When a file was written; `otherwise` where it is not there."""
    try:
        return run.modified(name)
    except FileNotFoundError:
        return otherwise


def _state(run: Storage, index: Index, updated: float | None) -> str:
    if index.newest is not None and _has_ended(run, index.newest.attempt):
        return "ended"
    if updated is None or index.newest is None:
        return "still"
    begun = _written(run, f"attempt-{index.newest.attempt}.json")
    samples = sum(part.attempt == index.newest.attempt for part in index.owner.values())
    usual = max(0.0, updated - begun) / samples if begun is not None else 0.0
    return "growing" if time.time() - updated < max(_YOUNG, _USUAL * usual) else "still"


def _has_ended(run: Storage, sampled: int) -> bool:
    """Whether the run says that it has ended; what it said before it was resumed does not count.

    Args:
        sampled: the latest attempt that has samples.
    """
    try:
        run.check(STATUS)
        ended = json.loads(run.read(STATUS))["ended"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # an earlier version's, damaged, or it goes on
        return False
    attempt = max(attempt for name in run.names() if (attempt := attempt_of_fingerprint(name)) is not None)
    if attempt == sampled:
        return isinstance(ended, float)
    begun = _written(run, f"attempt-{attempt}.json")
    return isinstance(ended, float) and begun is not None and begun <= ended
