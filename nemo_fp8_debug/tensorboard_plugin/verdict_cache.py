"""Headlines of runs, each computed once and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._version import __version__
from ..analysis.formatting import jsonable
from .jobs.job_queue import JobQueue
from .records.logdir import Logdir
from .records.part_matrices import PartMatrices

#: results that are kept, some kilobytes each; the one used longest ago goes first
_MOST = 2000


def find_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/nemo_fp8_debug`, or `~/.cache/nemo_fp8_debug`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "nemo_fp8_debug"


class VerdictCache:
    """Results by what they are results of. A folder that cannot be read or written keeps nothing, which is no error."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: made when something is kept.
        """
        self._folder = folder

    def get(self, key: Mapping[str, Any]) -> Any:
        """Return the result that was kept under `key`; None if there is none, or its file is damaged."""
        path = self._path(key)
        try:
            found = json.loads(path.read_bytes())
            if found["checksum"] != _digest([dict(key), found["result"]]):
                return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found["result"]

    def put(self, key: Mapping[str, Any], result: Any) -> None:
        """Keep a result that JSON can say."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = json.dumps({"checksum": _digest([dict(key), result]), "result": result})
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as file:
                file.write(content)
            os.replace(file.name, self._path(key))
            self._forget()

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._folder / f"{_digest(dict(key))}.json"

    def _forget(self) -> None:
        with os.scandir(self._folder) as entries:
            files = sorted((entry.stat().st_mtime, entry.path) for entry in entries if entry.is_file())
        for _, path in files[: max(0, len(files) - _MOST)]:
            os.unlink(path)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


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
        return {"place": str(record), "version": index.version, "damaged": jsonable(index.damaged)}
