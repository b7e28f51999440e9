"""Headlines of the runs of the table, each computed once and kept in the user's cache folder."""

from __future__ import annotations

from typing import Any

from ..._version import __version__
from ..jobs.jobs import Jobs
from ..records.logdir import Logdir
from ..records.part_matrices import Parts
from ..web.json_values import plain
from .kept import Kept, cache_folder

_BY = "step"


class Headlines:
    """Headlines, under what they depend on: the records as they are, the package's version, the options."""

    def __init__(self, jobs: Jobs, parts: Parts, logdir: Logdir) -> None:
        """
        Args:
            jobs: compute them.
        """
        self._jobs, self._parts, self._logdir = jobs, parts, logdir
        self._kept = Kept(cache_folder() / "verdicts")

    def known(self, run: str, baseline: str | None) -> Any:
        """The headline of a run that was judged before, as it is now; None: it was not."""
        return self._kept.get(self._identity([run, baseline, None]))

    def ask(self, run: str, baseline: str | None, reference: str | None) -> dict[str, Any]:
        """How far the headline of a run is, as `Jobs.ask` says it; begins it if it is not known."""
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
        return {"place": str(record), "version": index.version, "damaged": plain(index.damaged)}
