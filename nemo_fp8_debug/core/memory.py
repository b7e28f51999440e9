"""Memory that was freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """What glibc keeps of freed memory, in an arena for each of many threads; other C libraries do as they do."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).malloc_trim(0)
