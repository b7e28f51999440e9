"""Caches of recent results: in memory up to a budget, and in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A thread-safe cache of values by key. If it is full, it drops the least recently used values.

    If several threads miss a key at once, one makes the value and the others wait for it.
    """

    def __init__(self, budget: int, size: Callable[[V], int] = lambda value: 1) -> None:
        """
        Args:
            budget: largest sum of `size` over all cached values. By default, the largest number of values.
            size: function that returns the size of a value, for example its bytes.
        """
        self._budget, self._size = budget, size
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._taken = 0
        self._lock = threading.Lock()
        #: for each key: while a thread makes its value, the event that is set when the thread is done
        self._made: dict[Hashable, threading.Event] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of `key`. Make the value if it is not in the cache.

        Args:
            make: function that makes the value. It must not call `get_or_make` with the same key.
        """
        while True:
            with self._lock:
                if key in self._held:
                    self._held.move_to_end(key)
                    return self._held[key]
                awaited = self._made.get(key)
                if awaited is None:
                    self._made[key] = threading.Event()
                    break
            awaited.wait()  # if the value was too large to cache, or could not be made, this thread makes it again
        try:
            value = make()
            self._hold(key, value)
            return value
        finally:
            with self._lock:
                self._made.pop(key).set()

    def _hold(self, key: Hashable, value: V) -> None:
        with self._lock:
            self._held[key] = value
            self._taken += self._size(value)
            while self._taken > self._budget:
                self._taken -= self._size(self._held.popitem(last=False)[1])


#: largest number of results to keep, some kilobytes each. If there are more, the least recently used is deleted
_MOST = 2000


def find_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/nemo_fp8_debug`, or `~/.cache/nemo_fp8_debug`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "nemo_fp8_debug"


class VerdictDiskCache:
    """A cache of results on disk. The keys contain all inputs. If the folder is not readable or writable, nothing is
    cached.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: cache folder, created with the first result.
        """
        self._folder = folder

    def get_result(self, key: Mapping[str, Any]) -> Any:
        """Return the result of `key`, or None if there is no result or its file is damaged."""
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

    def store_result(self, key: Mapping[str, Any], result: Any) -> None:
        """Store a result that JSON can represent."""
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
