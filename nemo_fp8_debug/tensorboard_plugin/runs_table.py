"""The list of runs, and the table of all runs. The table must read each record."""

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
from ..record.parts import PartDamagedError, PartGoneError, order_newest_parts_first, read_part_columns
from ..record.reader import read_fingerprint, read_status
from ..record.schema import parse_attempt_number
from ..record.storage import FolderStorage
from .cache import LRUCache, VerdictDiskCache, find_cache_folder
from .jobs.job_queue import JobQueue
from .records.logdir import LogdirRecords
from .records.part_matrices import CachedPartReader, SampledStepIndex
from .records.run_summary import find_quantization
from .web import RequestError

#: a record counts as growing if its newest part is younger than this many seconds, or this many usual sampling intervals
_YOUNG, _USUAL = 120.0, 3.0
#: seconds that a request may spend on reading records
_PATIENCE = 1.0


def list_runs(parts: CachedPartReader, logdir: LogdirRecords) -> list[dict[str, Any]]:
    """Return all runs by name. If time runs out, describe the remaining runs from the names of their files."""
    until = time.monotonic() + _PATIENCE
    names = sorted(logdir.list_known_records().records)
    return [_describe(parts, name, logdir, in_haste=time.monotonic() > until) for name in names]


#: words in the name of a run that suggest the run's part
_PLAYS = {
    "baseline": re.compile(r"(^|[\W_])(good|baseline)([\W_]|$)", re.IGNORECASE),
    "reference": re.compile(r"(^|[\W_])(reference|bf16)([\W_]|$)", re.IGNORECASE),
    "run": re.compile(r"(^|[\W_])bad([\W_]|$)", re.IGNORECASE),
}


def suggest_run_roles(names: Sequence[str]) -> dict[str, str | None]:
    """Suggest baseline, reference and run by the names of runs.

    Example:
        >>> suggest_run_roles(["bad", "baseline", "bf16", "other"])
        {'baseline': 'baseline', 'reference': 'bf16', 'run': 'bad'}
    """
    found = {part: next((name for name in names if pattern.search(name)), None) for part, pattern in _PLAYS.items()}
    others = [name for name in names if name not in (found["baseline"], found["reference"])]
    return found | {"run": found["run"] or next(iter([*others, *names]), None)}


def _describe(parts: CachedPartReader, name: str, logdir: LogdirRecords, in_haste: bool) -> dict[str, Any]:
    """Return an entry of the list of runs, also for unreadable records.

    Args:
        in_haste: read only the names of parts, and do not count samples, unless the record was read before.
    """
    nothing = {"first": None, "last": None, "samples": 0, "updated": None, "version": ""}
    try:
        run = logdir.get_record(name)
        with capture_warnings():
            read_fingerprint(run)
        index = parts.get_known_index(run) if in_haste else parts.read_index(run)
        updated = _updated(run, index)
        state = _state(run, index, updated)
    except Exception as error:  # drivers of remote file systems raise errors of their own
        return {"name": name, "state": "unreadable", **nothing, "why": str(error) or type(error).__name__}
    counted = len(index.steps) if index.version else None
    known: dict[str, Any] = {"samples": counted, "updated": updated, "version": index.version}
    if not len(index.steps):
        why = f"All its metrics are unreadable: {next(iter(index.damaged.values()))}" if index.damaged else None
        return {"name": name, "state": "unreadable" if why else "empty", **nothing, **known, "why": why}
    ends = {"first": int(index.steps[0]), "last": int(index.steps[-1])}
    return {"name": name, "state": state, **ends, **known, "why": None}


def _updated(run: FolderStorage, index: SampledStepIndex) -> float | None:
    """Return the time at which the newest part was written."""
    # If the part is missing, it was merged just now.
    return None if index.newest_part is None else _written(run, f"metrics/{index.newest_part.name}", time.time())


def _written(run: FolderStorage, name: str, otherwise: float | None = None) -> float | None:
    """Return the time at which a file was written, or `otherwise` if it is missing."""
    try:
        return run.read_modification_time(name)
    except FileNotFoundError:
        return otherwise


def _state(run: FolderStorage, index: SampledStepIndex, updated: float | None) -> str:
    if index.newest_part is not None and _has_ended(run, index.newest_part.attempt):
        return "ended"
    if updated is None or index.newest_part is None:
        return "still"
    begun = _written(run, f"attempt-{index.newest_part.attempt}.json")
    samples = sum(part.attempt == index.newest_part.attempt for part in index.owner.values())
    usual = max(0.0, updated - begun) / samples if begun is not None else 0.0
    return "growing" if time.time() - updated < max(_YOUNG, _USUAL * usual) else "still"


def _has_ended(run: FolderStorage, sampled: int) -> bool:
    """Return True if the run reported its end after it was last resumed.

    Args:
        sampled: the latest attempt that has samples.
    """
    try:
        ended = read_status(run).get("ended")
    except RecordError:
        return False
    if not isinstance(ended, float):  # the run goes on, or the file is damaged or from an earlier version
        return False
    attempt = max(attempt for name in run.list_names() if (attempt := parse_attempt_number(name)) is not None)
    begun = None if attempt == sampled else _written(run, f"attempt-{attempt}.json")
    return attempt == sampled or (begun is not None and begun <= ended)


def sort_names_by_color(names: Iterable[str], provider: Any) -> list[str]:
    """Return names in the order of their colors in TensorBoard, followed by names that TensorBoard does not know.

    TensorBoard sorts runs by their first event, and runs without events by name. A record belongs to the run of its name,
    or to the first run below it.

    Args:
        provider: TensorBoard's data provider, or None.
    """
    places = _places(provider)
    return sorted(names, key=lambda name: (_place(name, places), name))


def _places(provider: Any) -> dict[str, int]:
    try:
        known = [] if provider is None else provider.list_runs(RequestContext(), experiment_id="")
        told = [(math.inf if run.start_time is None else run.start_time, run.run_name) for run in known]
    except Exception:  # TensorBoard's data server may be busy or gone, and colors matter little
        return {}
    return {name: place for place, (_, name) in enumerate(sorted(told))}


def _place(name: str, places: dict[str, int]) -> float:
    below = "" if name == "." else f"{name}/"
    found = (place for run, place in places.items() if run.startswith(below))
    return places.get(name, min(found, default=math.inf))


#: largest number of parts of `steps` to search for a loss; we search the newest first
_PARTS_READ = 4


def _read_progress(parts: CachedPartReader, run: FolderStorage) -> dict[str, Any]:
    """Read the progress and the recipe of a run.

    Returns:
        recipe: the recipe of the metrics, or None if not recorded. is_quantized: False if nothing is quantized. loss: the
        last loss, or None if not finite. loss_step: the step of this loss. Without losses, loss and loss_step are None.
    """
    index = parts.read_index(run)
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


def _last_loss(run: FolderStorage, index: SampledStepIndex) -> tuple[int | None, float | None]:
    for part in order_newest_parts_first(index.listed["steps"])[:_PARTS_READ]:
        try:
            rows = read_part_columns(run, "steps", part, ("attempt", "step", "loss"))[0]
        except (PartGoneError, PartDamagedError):
            continue
        losses = pl.DataFrame(pl.from_arrow(rows)).drop_nulls("loss").sort("step")
        if len(losses):
            return int(losses["step"][-1]), float(losses["loss"][-1])
    return None, None


_BY = "step"


class HeadlineCache:
    """A cache of headlines. The key is the state of the records, the package's version, and the options."""

    def __init__(self, jobs: JobQueue, parts: CachedPartReader, logdir: LogdirRecords) -> None:
        """
        Args:
            jobs: queue that computes headlines.
        """
        self._jobs, self._parts, self._logdir = jobs, parts, logdir
        self._kept = VerdictDiskCache(find_cache_folder() / "verdicts")

    def get_cached(self, run: str, baseline: str | None) -> Any:
        """Return the cached headline of a run in its current state, or None."""
        return self._kept.get_result(self._identity([run, baseline, None]))

    def get_or_start_job(self, run: str, baseline: str | None, reference: str | None) -> dict[str, Any]:
        """Return the state of a run's headline, as in `JobQueue.get_or_start_job`. Begin the job if it is unknown."""
        identity = self._identity([run, baseline, reference])
        if (known := self._kept.get_result(identity)) is not None:
            return {"state": "done", "result": known}
        records = identity["records"]
        places = dict(zip(("run", "baseline", "reference"), (record["place"] for record in records), strict=True))
        version = " ".join(record["version"] for record in records)
        answer = self._jobs.get_or_start_job({"kind": "headline", **places, "by": _BY, "version": version}, version)
        # A temporary outage can look like damage, so do not cache this headline.
        if answer["state"] == "done" and not any(record["damaged"] for record in records):
            self._kept.store_result(identity, answer["result"])
        return answer

    def _identity(self, names: list[str | None]) -> dict[str, Any]:
        return {"package": __version__, "by": _BY, "records": [self._state_of(name) for name in names]}

    def _state_of(self, name: str | None) -> dict[str, Any]:
        if name is None:
            return {"place": None, "version": "", "damaged": {}}
        record = self._logdir.get_record(name)
        index = self._parts.read_index(record)
        return {"place": str(record), "version": index.version, "damaged": make_jsonable(index.damaged)}


#: largest number of rows to keep, a few words each
_KEPT = 8192


class RunsTable:
    """The rows of the table, by run. An unchanged record is read only once."""

    def __init__(self, parts: CachedPartReader, logdir: LogdirRecords, headlines: HeadlineCache) -> None:
        """
        Args:
            headlines: cache of headlines. A row includes the run's headline if it is cached.
        """
        self._parts, self._logdir, self._headlines = parts, logdir, headlines
        self._known: LRUCache[dict[str, Any]] = LRUCache(_KEPT)
        #: time and row of the last answer, by run and baseline
        self._told: dict[tuple[str, str | None], tuple[float, Any]] = {}

    def list_rows(self, baseline: str | None) -> dict[str, Any]:
        """Return all rows. Read new rows first, then the rows that were read longest ago. If time runs out, do not update
        the others.

        Returns:
            rows: for each name the result of `_read_progress`, `version` (the record's state), and `headline` (None if
            unknown). If the record is unreadable, `why` (the reason). is_complete: False if some rows are missing, so that
            the caller should ask again.
        """
        until, names = time.monotonic() + _PATIENCE, sorted(self._logdir.list_known_records().records)
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
            record = self._logdir.get_record(name)
            version = self._parts.read_index(record).version
            about = self._known.get_or_make((str(record), version), lambda: _read_progress(self._parts, record))
            return about | {"version": version, "headline": self._headlines.get_cached(name, baseline)}
        except (RequestError, RecordError, OSError, RecursionError) as error:
            return {"why": str(error)}
