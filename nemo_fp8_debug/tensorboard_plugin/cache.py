"""What was read lately, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key, the least recently used let go first; for use by many threads.

    Of threads that miss a key at once, one makes its value and the others wait for it.
    """

    def __init__(self, budget: int, size: Callable[[V], int]) -> None:
        """
        Args:
            budget: bytes (or whatever `size` counts) that are kept at most.
            size: of a value.
        """
        self._budget, self._size = budget, size
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._taken = 0
        self._lock = threading.Lock()
        #: by key, set once the thread that makes its value has ended
        self._made: dict[Hashable, threading.Event] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of `key`; make it if it is not held.

        Args:
            make: must not ask for `key`.
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
            awaited.wait()  # what was made may be too large to be held, or making it failed: then it is made again
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
