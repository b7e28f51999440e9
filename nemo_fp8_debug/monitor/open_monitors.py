"""The monitors of this process that record to a folder, and how they end if nobody closes them."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Closable(Protocol):
    """A monitor."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    def close(self) -> None:
        """Record what is left."""


#: the last one of each folder
_of_folder: weakref.WeakValueDictionary[str, Closable] = weakref.WeakValueDictionary()


def replace(folder: str, monitor: Closable) -> bool:
    """Note which monitor records to a folder; whether one that is still open did so before."""
    earlier = _of_folder.get(folder)
    _of_folder[folder] = monitor
    return earlier is not None and not earlier.closed


def close_at_exit(monitor: Closable, keep: bool) -> Callable[[], object]:
    """Let a process that ends without closing its monitor lose nothing; returns what calls that off.

    Args:
        keep: whether it is held until then: threads of one that was dropped could still wait for other ranks at the end of
            the interpreter, and would end the process with an error.
    """
    close = monitor.close if keep else partial(_close, weakref.ref(monitor))
    atexit.register(close)
    return partial(atexit.unregister, close)


def _close(monitor: weakref.ref[Closable]) -> None:
    if found := monitor():
        found.close()
