"""Limit how long training waits for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..core.waits import WaitTimes

#: total seconds that training may wait for ranks or hosts that do not answer
LONGEST = 60.0
#: fraction of these seconds that is reserved for short questions after a long wait: have all ranks ended, and which rank
#: warns
RESERVE = 1 / 4


def compute_store_grace_seconds() -> float:
    """Return the seconds in which a store must report a timeout.

    If it takes longer, we assume that the store itself is gone, and not that a rank is late.
    """
    return RESERVE * LONGEST / 2


def compute_background_wait() -> float:
    """Return the seconds to wait for an answer in the background.

    The reserve at the end of a run is long enough for two such answers.
    """
    return RESERVE * LONGEST / 3


class WaitBudget:
    """The budget of seconds that training may still wait. It is refilled once every rank has taken part."""

    def __init__(self, waits: WaitTimes) -> None:
        """
        Args:
            waits: adds up the waiting times.
        """
        self._waits, self._left = waits, LONGEST

    def refill_budget(self) -> None:
        """Refill the budget, because all ranks have answered."""
        self._left = LONGEST

    @contextlib.contextmanager
    def spend_wait(self, what: str, reserve: bool = False) -> Iterator[float]:
        """Measure a wait of the training thread in a `with` block. Yield the seconds that the wait may take.

        Args:
            what: the purpose of the wait, one of the names in `core.waits`.
            reserve: whether this is a short question, which may use the reserve.
        """
        began = time.monotonic()
        try:
            with self._waits.measure_wait(what):
                yield max(0.0, self._left - (0.0 if reserve else RESERVE * LONGEST))
        finally:
            self._left = max(0.0, self._left - (time.monotonic() - began))
