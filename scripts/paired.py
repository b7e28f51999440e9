"""Timing steps that take turns: what benchmarks of steps share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

RESAMPLES = 5000


class Taken(NamedTuple):
    """What a call took, in seconds."""

    wall: float
    #: processor time of the thread that called
    thread: float


def timed(call: Callable[[], object]) -> Taken:
    wall, thread = time.perf_counter(), time.thread_time()
    call()
    return Taken(time.perf_counter() - wall, time.thread_time() - thread)


@dataclass(frozen=True)
class Estimate:
    """A median and the 95% interval of it, by bootstrap."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        found = np.asarray(values, np.float64)
        resampled = np.random.default_rng(0).choice(found, (RESAMPLES, len(found)))
        low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
        return cls(float(np.median(found)), float(low), float(high))

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"
