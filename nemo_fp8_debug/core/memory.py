"""Reuse the memory of large arrays, and return freed memory to the system.

`retain_freed_memory` and `release_freed_memory` work with glibc only. Other C libraries ignore them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys

import numpy as np
import numpy.typing as npt

#: options of `mallopt`. The first is the least size of an array that gets its own mapping, which is unmapped when the array
#: is freed. The second is how much free memory glibc keeps at the top of the heap. The third is how much extra memory glibc
#: requests from the system each time
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


def retain_freed_memory() -> None:
    """Make glibc reuse freed memory until `release_freed_memory`.

    By default, each array of several megabytes gets a new mapping, which the system clears page by page.
    """
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 64 << 20)):
            libc.mallopt(option, size)


def release_freed_memory() -> None:
    """Return freed memory to the system. Otherwise glibc keeps it, in arenas for many threads."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)


class ArrayPool:
    """A pool of large arrays. Memory of unreferenced arrays is reused, because the system takes time to clear new memory."""

    def __init__(self) -> None:
        self._all: list[npt.NDArray[np.float64]] = []

    def take_array(self, *shape: int) -> npt.NDArray[np.float64]:
        """Return an uninitialized float64 array of this shape.

        Example:
            >>> buffers = ArrayPool()
            >>> first, second = buffers.take_array(2, 3), buffers.take_array(2, 3)
            >>> where = first.ctypes.data
            >>> del first
            >>> buffers.take_array(3, 2).ctypes.data == where, second.shape
            (True, (2, 3))
        """
        size = math.prod(shape)
        for i in range(len(self._all)):
            # The list has one reference, and `getrefcount` has another. A view of the array would add a third reference.
            if self._all[i].size == size and sys.getrefcount(self._all[i]) == 2:
                return self._all[i].reshape(shape)
        self._all = [each for each in self._all if each.size == size]
        self._all.append(np.empty(size))
        return self._all[-1].reshape(shape)
