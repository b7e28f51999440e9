"""What is known of each record: whether it grows, from when to when it was sampled, whether it can be read."""

from __future__ import annotations

import time
from typing import Any

from ..errors import RecordError, hearing
from ..record.place import Place
from ..record.reader import read_fingerprint
from .errors import Refused
from .logdir import Logdir
from .parts import Index, Parts

#: a record grows while its newest part is younger than so many seconds, or so many times what usually passes between samples
_YOUNG, _USUAL = 120.0, 3.0
#: seconds for which runs are read to answer what they are
_PATIENCE = 1.0


def listed(parts: Parts, logdir: Logdir) -> list[dict[str, Any]]:
    """All runs by name; those that cannot be read in time as their files are called."""
    until = time.monotonic() + _PATIENCE
    records = sorted(logdir.found().records.items())
    return [about(parts, name, run, in_haste=time.monotonic() > until) for name, run in records]


def about(parts: Parts, name: str, run: Place, in_haste: bool) -> dict[str, Any]:
    """A line of the list of runs.

    Args:
        in_haste: only the names of parts are looked at, where they were not read before; samples are not counted then.
    """
    nothing = {"first": None, "last": None, "samples": 0, "updated": None, "version": ""}
    try:
        with hearing():
            read_fingerprint(run)
        index = parts.glance(run) if in_haste else parts.index(run)
        updated = _updated(run, index)
    except (RecordError, Refused, OSError) as error:
        return {"name": name, "state": "unreadable", **nothing, "why": str(error)}
    counted = len(index.steps) if index.version else None
    known: dict[str, Any] = {"samples": counted, "updated": updated, "version": index.version}
    if not len(index.steps):
        why = f"No part of its figures can be read: {next(iter(index.damaged.values()))}" if index.damaged else None
        return {"name": name, "state": "unreadable" if why else "empty", **nothing, **known, "why": why}
    ends = {"first": int(index.steps[0]), "last": int(index.steps[-1])}
    return {"name": name, "state": _state(run, index, updated), **ends, **known, "why": None}


def _updated(run: Place, index: Index) -> float | None:
    """When the newest part was written."""
    if index.newest is None:
        return None
    try:
        return run.modified(f"figures/{index.newest.name}")
    except FileNotFoundError:  # merged since: just now
        return time.time()


def _state(run: Place, index: Index, updated: float | None) -> str:
    if updated is None or index.newest is None:
        return "still"
    begun = run.modified(f"attempt-{index.newest.attempt}.json") if index.newest else None
    samples = sum(part.attempt == index.newest.attempt for part in index.owner.values())
    usual = max(0.0, updated - begun) / samples if begun is not None else 0.0
    return "growing" if time.time() - updated < max(_YOUNG, _USUAL * usual) else "still"
