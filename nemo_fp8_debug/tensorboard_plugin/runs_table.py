"""The list of runs, and the table of all runs, for which each record has to be read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
from tensorboard.context import RequestContext

from .._version import __version__
from ..analysis.formatting import make_jsonable
from ..core.scale_sources import HIGH_PRECISION
from ..errors import RecordError, capture_warnings
from ..record.parts import PartDamagedError, PartGoneError, order_newest_first, read_columns
from ..record.reader import read_fingerprint, read_status
from ..record.schema import parse_attempt
from ..record.storage import Storage
from .cache import Cache, VerdictCache, find_cache_folder
from .jobs.job_queue import JobQueue
from .records.logdir import Logdir
from .records.part_matrices import PartMatrices, RecordIndex
from .records.run_summary import find_quantization
from .web import Refused

#: a record grows while its newest part is younger than so many seconds, or so many times what usually passes between samples
_YOUNG, _USUAL = 120.0, 3.0
#: seconds for which records are read to answer
_PATIENCE = 1.0


def list_runs(parts: PartMatrices, logdir: Logdir) -> list[dict[str, Any]]:
    """Return all runs by name; those that cannot be read in time as their files are called."""
    until = time.monotonic() + _PATIENCE
    names = sorted(logdir.find_records().records)
    return [_describe(parts, name, logdir, in_haste=time.monotonic() > until) for name in names]


#: what names of runs say of the parts that they play
_PLAYS = {
    "baseline": re.compile(r"(^|[\W_])(good|baseline)([\W_]|$)", re.IGNORECASE),
    "reference": re.compile(r"(^|[\W_])(reference|bf16)([\W_]|$)", re.IGNORECASE),
    "run": re.compile(r"(^|[\W_])bad([\W_]|$)", re.IGNORECASE),
}


def suggest_parts(names: Sequence[str]) -> dict[str, str | None]:
    """Return which of the runs plays which part, by their names.

    Example:
        >>> suggest_parts(["bad", "baseline", "bf16", "other"])
        {'baseline': 'baseline', 'reference': 'bf16', 'run': 'bad'}
    """
    found = {part: next((name for name in names if pattern.search(name)), None) for part, pattern in _PLAYS.items()}
    others = [name for name in names if name not in (found["baseline"], found["reference"])]
    return found | {"run": found["run"] or next(iter([*others, *names]), None)}


def _describe(parts: PartMatrices, name: str, logdir: Logdir, in_haste: bool) -> dict[str, Any]:
    """A line of the list of runs, which no run makes fail.

    Args:
        in_haste: only the names of parts are looked at, where they were not read before; samples are not counted then.
    """
    nothing = {"first": None, "last": None, "samples": 0, "updated": None, "version": ""}
    try:
        run = logdir.record(name)
        with capture_warnings():
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


def _updated(run: Storage, index: RecordIndex) -> float | None:
    """When the newest part was written."""
    # One that is not there was merged since: just now.
    return None if index.newest is None else _written(run, f"metrics/{index.newest.name}", time.time())


def _written(run: Storage, name: str, otherwise: float | None = None) -> float | None:
    """When a file was written; `otherwise` where it is not there."""
    try:
        return run.modified(name)
    except FileNotFoundError:
        return otherwise


def _state(run: Storage, index: RecordIndex, updated: float | None) -> str:
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
        ended = read_status(run).get("ended")
    except RecordError:
        return False
    if not isinstance(ended, float):  # an earlier version's, damaged, or it goes on
        return False
    attempt = max(attempt for name in run.names() if (attempt := parse_attempt(name)) is not None)
    begun = None if attempt == sampled else _written(run, f"attempt-{attempt}.json")
    return attempt == sampled or (begun is not None and begun <= ended)


def order_by_color(names: Iterable[str], provider: Any) -> list[str]:
    """Return names in the order of their colors: as TensorBoard has them, then those unknown to it, by name.

    TensorBoard sorts runs by their first event, and runs without one by name. A record belongs to the run of its name, or
    to the first one below it.

    Args:
        provider: TensorBoard's data provider; None: there is none.
    """
    places = _places(provider)
    return sorted(names, key=lambda name: (_place(name, places), name))


def _places(provider: Any) -> dict[str, int]:
    try:
        known = [] if provider is None else provider.list_runs(RequestContext(), experiment_id="")
        told = [(math.inf if run.start_time is None else run.start_time, run.run_name) for run in known]
    except Exception:  # its data server may be busy or gone, and colors are not worth a failure
        return {}
    return {name: place for place, (_, name) in enumerate(sorted(told))}


def _place(name: str, places: dict[str, int]) -> float:
    below = "" if name == "." else f"{name}/"
    found = (place for run, place in places.items() if run.startswith(below))
    return places.get(name, min(found, default=math.inf))


#: parts of `steps` that are read for a loss, the newest first
_PARTS_READ = 4


def _read_progress(parts: PartMatrices, run: Storage) -> dict[str, Any]:
    """How far a run is and what it casts in.

    Returns:
        recipe: that its metrics are of; None: the record does not say. is_quantized: False where nothing is. loss, and
        loss_step: at which it was written; a loss that is not finite is None at a step. Both None where there is none.
    """
    index = parts.index(run)
    with capture_warnings():
        fingerprint = read_fingerprint(run)
        step, loss = _last_loss(run, index)
    recipe = fingerprint.get("recipe")
    return {
        "recipe": recipe.get("measured_against") if isinstance(recipe, dict) else None,
        "is_quantized": find_quantization(parts, run, index, fingerprint) != HIGH_PRECISION,
        "loss": loss if loss is not None and np.isfinite(loss) else None,
        "loss_step": step,
    }


def _last_loss(run: Storage, index: RecordIndex) -> tuple[int | None, float | None]:
    for part in order_newest_first(index.listed["steps"])[:_PARTS_READ]:
        try:
            rows = read_columns(run, "steps", part, ("attempt", "step", "loss"))[0]
        except (PartGoneError, PartDamagedError):
            continue
        losses = pl.DataFrame(pl.from_arrow(rows)).drop_nulls("loss").sort("step")
        if len(losses):
            return int(losses["step"][-1]), float(losses["loss"][-1])
    return None, None


_BY = "step"


class Headlines:
    """Headlines, under what they depend on: the records as they are, the package's version, the options."""

    def __init__(self, jobs: JobQueue, parts: PartMatrices, logdir: Logdir) -> None:
        """
        Args:
            jobs: compute them.
        """
        self._jobs, self._parts, self._logdir = jobs, parts, logdir
        self._kept = VerdictCache(find_cache_folder() / "verdicts")

    def known(self, run: str, baseline: str | None) -> Any:
        """Return the headline of a run that was judged before, as it is now; None if it was not."""
        return self._kept.get(self._identity([run, baseline, None]))

    def ask(self, run: str, baseline: str | None, reference: str | None) -> dict[str, Any]:
        """Return how far the headline of a run is, as `JobQueue.ask` does; begin it if it is not known."""
        identity = self._identity([run, baseline, reference])
        if (known := self._kept.get(identity)) is not None:
            return {"state": "done", "result": known}
        records = identity["records"]
        places = dict(zip(("run", "baseline", "reference"), (record["place"] for record in records), strict=True))
        version = " ".join(record["version"] for record in records)
        answer = self._jobs.ask({"kind": "headline", **places, "by": _BY, "version": version}, version)
        # What is damaged may be an outage.
        if answer["state"] == "done" and not any(record["damaged"] for record in records):
            self._kept.put(identity, answer["result"])
        return answer

    def _identity(self, names: list[str | None]) -> dict[str, Any]:
        return {"package": __version__, "by": _BY, "records": [self._state_of(name) for name in names]}

    def _state_of(self, name: str | None) -> dict[str, Any]:
        if name is None:
            return {"place": None, "version": "", "damaged": {}}
        record = self._logdir.record(name)
        index = self._parts.index(record)
        return {"place": str(record), "version": index.version, "damaged": make_jsonable(index.damaged)}


#: rows that are kept, a few words each
_KEPT = 8192


class RunsTable:
    """Rows by run. What a record says is read once as long as it stays as it is."""

    def __init__(self, parts: PartMatrices, logdir: Logdir, headlines: Headlines) -> None:
        """
        Args:
            headlines: those that are known are told with the rows.
        """
        self._parts, self._logdir, self._headlines = parts, logdir, headlines
        self._known: Cache[dict[str, Any]] = Cache(_KEPT)
        #: by run and baseline when a row was told, and what
        self._told: dict[tuple[str, str | None], tuple[float, Any]] = {}

    def list_rows(self, baseline: str | None) -> dict[str, Any]:
        """Return rows, those first that are new or oldest; if time runs out, the others as they were.

        Returns:
            rows: by name what `_read_progress` returns, `version` of the record and `headline` (None: not known); or `why`
            it cannot be read. is_complete: whether all are there; if not, more are when it is asked again.
        """
        until, names = time.monotonic() + _PATIENCE, sorted(self._logdir.find_records().records)
        if len(self._told) + len(names) > _KEPT:
            self._told.clear()
        for name in sorted(names, key=lambda name: self._told.get((name, baseline), (0.0,))[0]):
            row = make_jsonable(self._row(name, None if name == baseline else baseline))
            self._told[name, baseline] = time.monotonic(), row
            if time.monotonic() > until:
                break
        rows = {name: self._told[name, baseline][1] for name in names if (name, baseline) in self._told}
        return {"rows": rows, "is_complete": len(rows) == len(names)}

    def _row(self, name: str, baseline: str | None) -> dict[str, Any]:
        try:
            record = self._logdir.record(name)
            version = self._parts.index(record).version
            about = self._known.get((str(record), version), lambda: _read_progress(self._parts, record))
            return about | {"version": version, "headline": self._headlines.known(name, baseline)}
        except (Refused, RecordError, OSError, RecursionError) as error:
            return {"why": str(error)}
