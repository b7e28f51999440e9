"""Memory of work on large arrays: little of it is asked of the system again and again, and what was freed goes back to it.

Both are about glibc; other C libraries do as they do.
"""

from __future__ import annotations

import contextlib
import ctypes

#: options of `mallopt`: the size from which memory is mapped for one array alone, and unmapped when that is freed; how much
#: that is free may be kept at the end, and how much more is taken at a time than is needed
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


def keep_freed() -> None:
    """Freed memory is used again, until `give_back`.

    By default arrays of megabytes are mapped anew each time, which clears them page by page.
    """
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        for option, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 64 << 20)):
            libc.mallopt(option, size)


def give_back() -> None:
    """What glibc keeps of freed memory, in an arena for each of many threads."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)
