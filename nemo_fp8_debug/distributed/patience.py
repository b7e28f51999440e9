"""Limit how long training waits for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..core.waits import Waits

#: seconds that training waits in all for ranks or hosts that do not answer
LONGEST = 60.0
#: fraction reserved for short questions after a long wait: whether all ranks have ended, and which one warns
RESERVE = 1 / 4


def compute_grace() -> float:
    """Return seconds for a store to report a wait in vain. If it stays silent, the store is gone and no rank is late."""
    return RESERVE * LONGEST / 2


def compute_short_wait() -> float:
    """Return seconds for an answer in the background. The reserve at the end of a run has room for two."""
    return RESERVE * LONGEST / 3


class Patience:
    """The seconds that training may still wait. They are full again once every rank has taken part."""

    def __init__(self, waits: Waits) -> None:
        """
        Args:
            waits: adds up the waits.
        """
        self._waits, self._left = waits, LONGEST

    def renew(self) -> None:
        """Refill the budget, because all ranks are there."""
        self._left = LONGEST

    @contextlib.contextmanager
    def spending(self, what: str, reserve: bool = False) -> Iterator[float]:
        """Wait in the training thread. Yield how many seconds the wait may take.

        Args:
            what: the purpose, one of the names in `core.waits`.
            reserve: whether this is a short question, which may use the reserve.
        """
        began = time.monotonic()
        try:
            with self._waits.waiting(what):
                yield max(0.0, self._left - (0.0 if reserve else RESERVE * LONGEST))
        finally:
            self._left = max(0.0, self._left - (time.monotonic() - began))
