"""Memory of work on large arrays: little of it is asked of the system again and again, and what was freed goes back to it.

What is said of freed memory is about glibc; other C libraries do as they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys

import numpy as np
import numpy.typing as npt

#: options of `mallopt`: the size from which memory is mapped for one array alone, and unmapped when that is freed; how much
#: that is free may be kept at the end, and how much more is taken at a time than is needed
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


def keep_freed() -> None:
    """Freed memory is used again, until `free_unused`.

    By default arrays of megabytes are mapped anew each time, which clears them page by page.
    """
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 64 << 20)):
            libc.mallopt(option, size)


def free_unused() -> None:
    """What glibc keeps of freed memory, in an arena for each of many threads."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)


class Buffers:
    """Large arrays whose memory is used again as soon as nobody has them: the system clears what it hands out anew."""

    def __init__(self) -> None:
        self._all: list[npt.NDArray[np.float64]] = []

    def array(self, *shape: int) -> npt.NDArray[np.float64]:
        """float64 of that shape, with any values.

        Example:
            >>> buffers = Buffers()
            >>> first, second = buffers.array(2, 3), buffers.array(2, 3)
            >>> where = first.ctypes.data
            >>> del first
            >>> buffers.array(3, 2).ctypes.data == where, second.shape
            (True, (2, 3))
        """
        size = math.prod(shape)
        for i in range(len(self._all)):
            # The list has it, and the call; an array over it would have it too.
            if self._all[i].size == size and sys.getrefcount(self._all[i]) == 2:
                return self._all[i].reshape(shape)
        self._all = [each for each in self._all if each.size == size]
        self._all.append(np.empty(size))
        return self._all[-1].reshape(shape)
