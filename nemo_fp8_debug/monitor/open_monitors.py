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


def replace(folder: str | None, monitor: Closable, warn: Callable[[str], object]) -> None:
    """Note which monitor records to a folder, if to any; `warn` of one that is still open and did so before."""
    if folder is None:
        return
    earlier = _of_folder.get(folder)
    _of_folder[folder] = monitor
    if earlier is not None and not earlier.closed:
        warn(f"another monitor of this process records to {folder} too, as another attempt; close that one")


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
