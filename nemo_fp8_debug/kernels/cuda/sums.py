"""What the kernels of a CUDA device share that add up: the code next to a value, and sums over threads and over blocks.

Nothing here requests Numba which thread it is: in its simulator only functions of the kernel's own module may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...numerics.metrics import QuantizationSums
from .launches import on_device

#: the sums, in the order of `QuantizationSums`
SUMS = 5

_EXPONENT = np.uint32(0x7F800000)


@on_device
def nearest(clamped: Any, codes: Any) -> Any:
    """The code next to a magnitude within the format's range, ties to even: a cast to `Codes`."""
    exponent = np.uint32(max(clamped.view(np.uint32), codes.lowest) & _EXPONENT).view(np.float32)
    anchor = np.float32(exponent * codes.anchor)  # a power of two times a few digits: exact, fused or not
    return np.float32(np.float32(clamped + anchor) - anchor)


@on_device
def keep(mine: Any, room: Any, thread: Any, threads: Any) -> None:
    """Put a thread's sums, float64, into shared memory: uint64 [sums * threads]."""
    for i in range(len(mine)):
        room[i * threads + thread] = mine[i].view(np.uint64)


@on_device
def fold(sums: Any, room: Any, thread: Any, half: Any, threads: Any) -> None:
    """One step of adding up what threads keep, always in the same order: those of the upper half to those of the lower."""
    if thread < half:
        for i in range(sums):
            at = i * threads + thread
            room[at] = (room[at].view(np.float64) + room[at + half].view(np.float64)).view(np.uint64)


def total(parts: torch.Tensor) -> QuantizationSums:
    """Float64 [parts, 5]; counts below 2^53 are exact in it."""
    underflows, overflows, *others = parts.sum(0)[:, None]
    return QuantizationSums(underflows.long(), overflows.long(), *others)
