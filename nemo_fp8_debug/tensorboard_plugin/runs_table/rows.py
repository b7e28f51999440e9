"""What the table of runs tells beside the list of runs, for which each record has to be read."""

from __future__ import annotations

import time
from typing import Any

from ...errors import RecordError
from ..records.cache import Cache
from ..records.logdir import Logdir
from ..records.part_matrices import Parts
from ..web.errors import Refused
from ..web.json_values import plain
from .headlines import Headlines
from .progress import progress

#: seconds for which records are read to answer
_PATIENCE = 1.0
#: rows that are kept, a few words each
_KEPT = 8192


class Rows:
    """Rows by run. What a record says is read once as long as it stays as it is."""

    def __init__(self, parts: Parts, logdir: Logdir, headlines: Headlines) -> None:
        """
        Args:
            headlines: those that are known are told with the rows.
        """
        self._parts, self._logdir, self._headlines = parts, logdir, headlines
        self._known: Cache[dict[str, Any]] = Cache(_KEPT, lambda _: 1)
        #: by run and baseline when a row was told, and what
        self._told: dict[tuple[str, str | None], tuple[float, Any]] = {}

    def told(self, baseline: str | None) -> dict[str, Any]:
        """As many as there is time for, those first that were never told or the longest time ago; others as they were.

        Returns:
            rows: by name what `progress` returns, `version` of the record and `headline` (None: not known); or `why` it
            cannot be read. is_complete: whether all are there; if not, more are when it is asked again.
        """
        until, names = time.monotonic() + _PATIENCE, sorted(self._logdir.found().records)
        if len(self._told) + len(names) > _KEPT:
            self._told.clear()
        for name in sorted(names, key=lambda name: self._told.get((name, baseline), (0.0,))[0]):
            row = plain(self._row(name, None if name == baseline else baseline))
            self._told[name, baseline] = time.monotonic(), row
            if time.monotonic() > until:
                break
        rows = {name: self._told[name, baseline][1] for name in names if (name, baseline) in self._told}
        return {"rows": rows, "is_complete": len(rows) == len(names)}

    def _row(self, name: str, baseline: str | None) -> dict[str, Any]:
        try:
            record = self._logdir.record(name)
            version = self._parts.index(record).version
            about = self._known.get((str(record), version), lambda: progress(self._parts, record))
            return about | {"version": version, "headline": self._headlines.known(name, baseline)}
        except (Refused, RecordError, OSError, RecursionError) as error:
            return {"why": str(error)}
