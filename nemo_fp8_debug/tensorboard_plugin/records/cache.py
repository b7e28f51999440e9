"""What was read lately, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key, the least recently used let go first; for use by many threads.

    Of two threads that miss a key at once both make its value: values of a key are equal, and no thread waits for another.
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

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made where it is not held."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        value = make()
        with self._lock:
            if key not in self._held:
                self._held[key] = value
                self._taken += self._size(value)
                while self._taken > self._budget:
                    self._taken -= self._size(self._held.popitem(last=False)[1])
        return value
