"""The amax of a tensor of 16-bit values in the memory of a CUDA device, for scales that depend on it."""

from __future__ import annotations

from typing import Any

import torch
from numba import uint32, uint64

from ..numerics.sketch import infinity_bin, magnitudes_of
from .cuda import cuda, kernel, largest_below, words_of
from .memory import DeviceMemory


@kernel
def _amax(values: Any, words: Any, head: Any, infinity: Any, amax: Any) -> None:
    best = cuda.shared.array(1, uint32)
    first, stride = cuda.grid(1), cuda.gridsize(1)
    if cuda.threadIdx.x == 0:
        best[0] = 0
    cuda.syncthreads()
    end, largest, i = infinity + 1, 0, first
    while i + 3 * stride < words.size:
        a, b, c, d = words[i], words[i + stride], words[i + 2 * stride], words[i + 3 * stride]
        largest = max(largest, largest_below(a, end), largest_below(b, end), largest_below(c, end), largest_below(d, end))
        i += 4 * stride
    while i < words.size:
        largest = max(largest, largest_below(words[i], end))
        i += stride
    for i in range(first, values.size - 4 * words.size, stride):  # before the first word and behind the last
        largest = max(largest, largest_below(uint64(values[i if i < head else i + 4 * words.size]), end))
    cuda.atomic.max(best, 0, uint32(largest))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.max(amax, 0, best[0])


def launch(values: Any, words: Any, cut: tuple[int, int], infinity: int, amax: Any, grid: tuple[Any, ...]) -> None:
    """Start to look for the amax of a tensor, NaN ignored.

    Args:
        values: uint16 [n].
        words: uint64, the same without what lies before the first word and behind the last.
        cut: `words_of` the values.
        infinity: its pattern.
        amax: uint32 [1], the largest pattern; to begin with zero.
        grid: how many blocks of threads, how many threads each has, and where there are streams the one to run in.
    """
    _amax[grid](values, words, cut[0], infinity, amax)


def amax_of(rows: torch.Tensor, grid: tuple[Any, ...]) -> torch.Tensor:
    """The amax of a contiguous tensor on a CUDA device, NaN ignored: float32 scalar there. The host does not wait for it.

    Args:
        rows: bfloat16 or float16.
        grid: as of `launch`, in the device's context.
    """
    n, device, pattern = rows.numel(), rows.device, torch.zeros(1, dtype=torch.int32, device=rows.device)
    head, body = cut = words_of(rows.data_ptr(), n)
    values, words = DeviceMemory(rows, "u2", n), DeviceMemory(rows, "u8", body, 2 * head)
    launch(values, words, cut, infinity_bin(rows.dtype), DeviceMemory(pattern, "u4", 1), grid)
    return magnitudes_of(rows.dtype, device)[pattern.long()][0]
