"""Results of jobs in the user's cache folder, for the next time that the tab is opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: results that are kept, some kilobytes each; the one used longest ago goes first
_MOST = 2000


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/nemo_fp8_debug`, or `~/.cache/nemo_fp8_debug`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "nemo_fp8_debug"


class Kept:
    """Results by what they are results of. A folder that cannot be read or written keeps nothing, which is no error."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: made when something is kept.
        """
        self._folder = folder

    def get(self, key: Mapping[str, Any]) -> Any:
        """The result that was kept under `key`; None: there is none, or its file is damaged."""
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
