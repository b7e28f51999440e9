"""Device functions that several kernels use: round a value to a code, and add up over threads and blocks.

Functions here take the thread's index as an argument. In Numba's simulator, only functions in the kernel's own module can
get this index from Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...numerics.metrics import QuantizationSums
from .launches import compile_device_function

#: number of sums, which are in the order of `QuantizationSums`
SUMS = 5

_EXPONENT = np.uint32(0x7F800000)


@compile_device_function
def round_to_code(clamped: Any, codes: Any) -> Any:
    """Return the code nearest to a magnitude, ties to even. The magnitude must be within the format's range."""
    exponent = np.uint32(max(clamped.view(np.uint32), codes.lowest) & _EXPONENT).view(np.float32)
    anchor = np.float32(exponent * codes.anchor)  # exact, fused or not: a power of two times a number of few digits
    return np.float32(np.float32(clamped + anchor) - anchor)


@compile_device_function
def store_thread_sums(mine: Any, room: Any, thread: Any, threads: Any) -> None:
    """Store the float64 sums of a thread in shared memory, which is uint64 [sums * threads]."""
    for i in range(len(mine)):
        room[i * threads + thread] = mine[i].view(np.uint64)


@compile_device_function
def fold_thread_sums(sums: Any, room: Any, thread: Any, half: Any, threads: Any) -> None:
    """Run one step of adding up the threads' sums: add the upper half of the threads to the lower half, in a fixed order."""
    if thread < half:
        for i in range(sums):
            at = i * threads + thread
            room[at] = (room[at].view(np.float64) + room[at + half].view(np.float64)).view(np.uint64)


def sum_part_rows(parts: torch.Tensor) -> QuantizationSums:
    """Add up the rows of `parts`, float64 [parts, 5], into one row. Counts below 2^53 are exact in float64."""
    underflows, overflows, *others = parts.sum(0)[:, None]
    return QuantizationSums(underflows.long(), overflows.long(), *others)
