"""Count the magnitude patterns of 16-bit values in the memory of a CUDA device, in one read.

This module is imported only if there is such a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import int32, uint32

from ...numerics.histogram import BINS
from ..memory import DeviceMemory
from .launches import CudaKernel, CudaStream, Grid, compile_device_function, count_multiprocessors, cuda

#: number of counters that a thread block keeps in shared memory (44 KiB): 88 binades of bfloat16, or 11 of float16
WINDOW = 11 << 10
#: number of these counters above the largest value sampled at the start: 8 binades of bfloat16, or 1 of float16
SPARE = 1 << 10
THREADS = 512
#: number of blocks that fit on a multiprocessor with 64 Ki registers and 228 KiB of shared memory (164 KiB suffice)
RESIDENT = 3
#: least number of thread blocks to start; with fewer, Numba warns that the device is not busy enough
LEAST_BLOCKS = 128
#: number of words that a thread loads before it counts the first word, so that enough loads are under way
AT_ONCE = 4

_MAGNITUDE = np.uint64(0x7FFF)
#: index of the counter for all values outside the window. This counter is never read
_OUTSIDE = np.uint32(WINDOW)
_COUNTERS = WINDOW + 1
#: indices of a thread block's two other numbers: the largest sampled pattern, and the number of zeros outside the window
_TOP, _ZEROS = 0, 1


@compile_device_function
def largest_below(word: Any, end: Any) -> Any:
    """Return the largest magnitude pattern of a word that is below `end`, or zero if no pattern is below `end`."""
    largest = int32(0)
    for _ in range(4):
        pattern = int32(word & _MAGNITUDE)
        if pattern < end:
            largest = max(largest, pattern)
        word >>= np.uint64(16)
    return largest


@compile_device_function
def _outside(word: Any, lowest: Any, counts: Any) -> Any:
    """Count the values of a word that are outside the window, except zeros.

    Return the number of zeros outside the window.
    """
    zeros = uint32(0)
    for _ in range(4):
        pattern = int32(word & _MAGNITUDE)
        if uint32(pattern - lowest) >= _OUTSIDE:
            if pattern == 0:
                zeros = uint32(zeros + 1)
            else:
                cuda.atomic.add(counts, pattern, 1)
        word >>= np.uint64(16)
    return zeros


@compile_device_function
def _tally(word: Any, lowest: Any, window: Any, counts: Any) -> Any:
    """Count the four values of a word, except zeros outside the window. Return the number of these zeros."""
    rest, farthest = word, uint32(0)
    for _ in range(4):
        # Values outside the window go to an extra counter, because a branch would cost more than this counter.
        place = min(uint32(int32(rest & _MAGNITUDE) - lowest), _OUTSIDE)
        cuda.atomic.add(window, place, uint32(1))
        farthest = max(farthest, place)
        rest >>= np.uint64(16)
    return _outside(word, lowest, counts) if farthest == _OUTSIDE else uint32(0)


@CudaKernel
def _count(values: Any, words: Any, head: Any, apart: Any, infinity: Any, counts: Any) -> None:
    window = cuda.shared.array(_COUNTERS, uint32)
    beside = cuda.shared.array(2, uint32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    first, stride = cuda.grid(1), cuda.gridsize(1)
    for i in range(thread, WINDOW, threads):
        window[i] = 0
    if thread == 0:
        beside[_TOP] = beside[_ZEROS] = 0
    cuda.syncthreads()

    # Sample values from the whole tensor, because part of it may be padding or masked. All blocks take the same sample.
    if words.size:
        cuda.atomic.max(beside, _TOP, uint32(largest_below(words[thread * apart], infinity)))
    cuda.syncthreads()
    lowest = int32(max(0, int32(beside[_TOP]) + SPARE - WINDOW))

    zeros, i = uint32(0), first
    while i + 3 * stride < words.size:
        a, b, c, d = words[i], words[i + stride], words[i + 2 * stride], words[i + 3 * stride]
        zeros += _tally(a, lowest, window, counts) + _tally(b, lowest, window, counts)
        zeros += _tally(c, lowest, window, counts) + _tally(d, lowest, window, counts)
        i += AT_ONCE * stride
    while i < words.size:
        zeros += _tally(words[i], lowest, window, counts)
        i += stride
    for i in range(first, values.size - 4 * words.size, stride):  # before the first word and after the last
        edge = values[i if i < head else i + 4 * words.size]
        cuda.atomic.add(counts, int32(edge & _MAGNITUDE), 1)

    cuda.atomic.add(beside, _ZEROS, zeros)
    cuda.syncthreads()
    if thread == 0:
        cuda.atomic.add(counts, 0, beside[_ZEROS])
    for i in range(thread, WINDOW, threads):
        if window[i]:
            cuda.atomic.add(counts, lowest + i, window[i])


def words_of(address: int, n: int) -> tuple[int, int]:
    """Return how many of `n` 16-bit values at `address` precede the first 8-byte boundary, and how many words follow it."""
    head = min(n, -address % 8 // 2)
    return head, (n - head) // 4


def launch_histogram_kernel(values: Any, words: Any, cut: tuple[int, int], infinity: int, counts: Any, grid: Grid) -> None:
    """Start the kernel without waiting for it.

    Args:
        values: uint16 [n].
        words: uint64, the same memory from the first 8-byte boundary on, as words of four values.
        cut: what `words_of` returned for the values.
        infinity: the pattern of infinity. Only finite values determine the place of the window.
        counts: int64 [32768], updated in place.
        grid: size of the launch, and its stream.
    """
    (head, body), threads = cut, grid[1]
    _count.start(grid, values, words, head, body // threads, infinity, counts)


def count_bit_patterns(values: torch.Tensor, counts: torch.Tensor, infinity: int) -> None:
    """Add to `counts[p]` how often the magnitude pattern `p` (sign bit cleared) occurs. Do not wait for the device.

    The work runs in torch's current stream. The first call on a device compiles the kernel.

    Args:
        values: contiguous 16-bit values on the device of `counts`.
        counts: int64 [32768], updated in place.
        infinity: the pattern of infinity in the format of the values.

    Raises:
        ValueError: the tensor's memory was freed. A kernel that reads freed memory would end the run.
    """
    n, start = values.numel(), values.data_ptr()
    if not n:
        return
    if not start:
        raise ValueError("the memory of the tensor was freed")
    head, body = words_of(start, n)
    blocks = max(LEAST_BLOCKS, RESIDENT * count_multiprocessors(values.device))
    bits, words = DeviceMemory(values, "u2", n), DeviceMemory(values, "u8", body, 2 * head)
    grid = blocks, THREADS, CudaStream.current(values.device)
    launch_histogram_kernel(bits, words, (head, body), infinity, DeviceMemory(counts, "i8", BINS), grid)


def run_kernel_once(device: torch.device) -> None:
    """Run the kernel once on a device.

    Raises:
        Exception: Numba cannot use the device. The exception may be of many types.
    """
    count_bit_patterns(
        torch.zeros(64, dtype=torch.int16, device=device), torch.zeros(BINS, dtype=torch.int64, device=device), 1
    )
