"""Timing steps that take turns, and their peak memory: what benchmarks of steps share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

RESAMPLES = 5000


class Taken(NamedTuple):
    """What a call took, in seconds."""

    wall: float
    #: processor time of the thread that called
    thread: float


def timed(call: Callable[[], object]) -> Taken:
    """Waits before and after for what the thread has given a GPU to do, but not for other streams of it."""
    _wait()
    wall, thread = time.perf_counter(), time.thread_time()
    call()
    _wait()
    return Taken(time.perf_counter() - wall, time.thread_time() - thread)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def peak_memory() -> float:
    """MiB, of this program alone; `ru_maxrss` begins with the peak of the process that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


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
