"""Measure how long the training thread waits in the monitor, and for what."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

#: what training can wait for
SAMPLE_OF_RANKS = "other ranks' part of a sample"
WORD = "the first rank's message"
LOSSES = "the sum of losses over ranks"
RECORDING = "recording"
LOGGERS = "loggers"
DUMPS = "room for dumps"

#: total seconds, and seconds per sample, below which the last line of a run does not mention waits
LEAST, LEAST_A_SAMPLE = 1.0, 0.01


class WaitTimes:
    """Times that the training thread waited. Any thread may read them.

    Example:
        >>> waits = WaitTimes()
        >>> waits.start_step(100)
        >>> with waits.measure_wait(RECORDING):
        ...     pass
        >>> list(waits.seconds)
        ['recording']
    """

    def __init__(self) -> None:
        #: seconds by reason
        self.seconds: dict[str, float] = {}
        #: seconds of waits in the step that waited longest, and the number of that step
        self.most, self.most_at = 0.0, -1
        self._step, self._at_step, self._ended = -1, 0.0, False

    @property
    def total_seconds(self) -> float:
        """Total seconds of all waits."""
        return sum(dict(self.seconds).values())

    def start_step(self, step: int) -> None:
        """Count waits from now on for this step."""
        self._step, self._at_step = step, 0.0

    def stop_counting(self) -> None:
        """Stop counting, because waits after the run delay no step."""
        self._ended = True

    @contextlib.contextmanager
    def measure_wait(self, what: str) -> Iterator[None]:
        """Measure a wait of the training thread. Do not nest these contexts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._add(what, time.monotonic() - began)

    def _add(self, what: str, seconds: float) -> None:
        if self._ended:
            return
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        self._at_step += seconds
        if self._at_step > self.most:
            self.most, self.most_at = self._at_step, self._step

    def to_plain_values(self) -> dict[str, Any]:
        """Return the figures for `status.json`."""
        by = {what: round(seconds, 3) for what, seconds in dict(self.seconds).items()}
        return {
            "seconds": round(self.total_seconds, 3),
            "for": by,
            "longest": round(self.most, 3),
            "longest_at_step": self.most_at,
        }

    def describe_waits(self, samples: int) -> str:
        """Return the clause for the last line of a run, or "" if training waited little.

        Args:
            samples: number of samples in the run.
        """
        if self.total_seconds < max(LEAST, LEAST_A_SAMPLE * samples):
            return ""
        by = dict(self.seconds)
        mainly = max(by, key=lambda what: by[what])
        most = f"{self.most:.1f} s of it at step {self.most_at}"
        return f"training waited {self.total_seconds:.1f} s, {most}, mainly for {mainly}"
