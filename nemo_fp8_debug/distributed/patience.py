"""How long training waits for other ranks: once, and no longer than promised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..core.waits import Waits

#: seconds that training waits in all for ranks, or a host, that do not answer
LONGEST = 60.0
#: the part of it that is kept for short questions after a long wait: is it over on all ranks, and which one says so
RESERVE = 1 / 4


def compute_grace() -> float:
    """Seconds that a store has to say that it waited in vain: one that does not is gone, and no rank is late."""
    return RESERVE * LONGEST / 2


def compute_short_wait() -> float:
    """Seconds for an answer in the background, of which the reserve of a run that ends has room for two."""
    return RESERVE * LONGEST / 3


class Patience:
    """Seconds that training still waits, whatever it waits for; all of them again once every rank has taken part."""

    def __init__(self, waits: Waits) -> None:
        """
        Args:
            waits: where they are added up.
        """
        self._waits, self._left = waits, LONGEST

    def renew(self) -> None:
        """All ranks are there: the next wait has all seconds again."""
        self._left = LONGEST

    @contextlib.contextmanager
    def spending(self, what: str, reserve: bool = False) -> Iterator[float]:
        """A wait of the training thread; yields how many seconds it may take.

        Args:
            what: it is for, as `core.waits` names it.
            reserve: it is a short question, and may use what long waits leave.
        """
        began = time.monotonic()
        try:
            with self._waits.waiting(what):
                yield max(0.0, self._left - (0.0 if reserve else RESERVE * LONGEST))
        finally:
            self._left = max(0.0, self._left - (time.monotonic() - began))
