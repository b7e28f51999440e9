"""Compute the quantization sums of a 16-bit matrix under block scales, on a CUDA device.

This module is imported only if there is such a matrix.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...numerics.block_scaling import Block, BlockScalingRule, MXFP8Scaling, compute_block_scales, view_as_matrix
from ...numerics.formats import E4M3, FloatFormat
from ...numerics.histogram import BINS, Histogram, compute_bin_magnitudes, find_infinity_bin
from ...numerics.metrics import DeferredRowSum, SumsFound
from ..memory import DeviceMemory
from .histogram import LEAST_BLOCKS
from .launches import CudaStream, Grid, count_multiprocessors
from .sums import SUMS, sum_part_rows
from .tile import STRIP, THREADS, TILE, CodeRounding, PatternLayout, compile_sum_kernel

#: number of thread blocks that fit on a multiprocessor, at 66 registers per thread and at most 37 KiB of shared memory
RESIDENT = 3


def make_kernel_arguments(shape: torch.Size, block: Block, dtype: torch.dtype, fmt: FloatFormat) -> tuple[Any, ...]:
    """Return the kernel arguments that describe a matrix, its blocks, values and codes. Block sizes are powers of two."""
    high, wide = block
    return (
        tuple(shape),
        (int(math.log2(high)), int(math.log2(wide // STRIP))),
        PatternLayout.from_dtype(dtype),
        CodeRounding.from_format(fmt),
    )


def whole_words(address: int, columns: int) -> bool:
    """Return True if rows consist of aligned 8-byte words, and a 32-bit index can address the words of 128 rows."""
    return address % 8 == 0 and columns % 4 == 0 and columns < 1 << 26


def launch_block_kernel(
    values: Any, words: Any, known: tuple[Any, ...], scales: tuple[Any, Any], out: Any, grid: Grid
) -> None:
    """Start the kernel without waiting for it.

    Args:
        values: uint16 [n], the matrix row by row.
        words: uint64 [n / 4], the same memory if `whole_words`, otherwise an empty array.
        known: what `make_kernel_arguments` returned for the matrix.
        scales: float32 and float64 [32768], scale and scale_inv for each amax.
        out: float64 [thread blocks * 5], in which each thread block stores its sums.
        grid: size of the launch, and its stream.
    """
    shape, block, kind, codes = known
    compile_sum_kernel(kind, grid[1]).start(grid, values, words, shape, block, *scales, codes, out)


def amax_of_histogram(histogram: Histogram) -> torch.Tensor:
    """Return the amax of a histogram, ignoring NaN: a float32 scalar on its device, without host synchronization."""
    end = find_infinity_bin(histogram.dtype) + 1
    return torch.where(
        histogram.counts[:end] > 0, compute_bin_magnitudes(histogram.dtype, histogram.counts.device)[:end], 0.0
    ).amax()


def block_quantization_sums(
    x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Histogram
) -> SumsFound:
    """Return the result of `torch_fallback.block_quantization_sums`, added up in another order.

    Run in torch's current stream.

    The first call on a device compiles the kernel.

    Args:
        x: [..., features], bfloat16 or float16, on a CUDA device.
        rule: how to cut blocks and choose their scales.
        role: role of the operand; the block shape depends on it.
        fmt: format of the codes.
        counted: the histogram of `x`.

    Raises:
        ValueError: the tensor's memory was freed. A kernel that reads freed memory would end the run.
    """
    device = x.device
    if not x.numel():
        return sum_part_rows(torch.zeros(1, SUMS, dtype=torch.float64, device=device))
    rows = view_as_matrix(x).contiguous()
    if not rows.data_ptr():
        raise ValueError("the memory of the tensor was freed")
    (high, across), n = (math.ceil(size / TILE) for size in rows.shape), rows.numel()
    blocks = max(LEAST_BLOCKS, min(RESIDENT * count_multiprocessors(device), high * across))
    known = make_kernel_arguments(rows.shape, rule.get_block_shape(role), x.dtype, fmt)
    values = DeviceMemory(rows, "u2", n)
    words = DeviceMemory(rows, "u8", n // 4 if whole_words(rows.data_ptr(), rows.shape[1]) else 0)
    parts = torch.empty(blocks, SUMS, dtype=torch.float64, device=device)
    torch.cuda.current_stream(device).wait_event(_kept(rule, fmt, x.dtype, device))
    whole = amax_of_histogram(counted) if rule.two_level else _no_amax(device)
    _, scale, scale_inv = compute_block_scales(rule, whole, fmt, x.dtype)
    scales = DeviceMemory(scale, "f4", len(scale)), DeviceMemory(scale_inv, "f8", len(scale_inv))
    grid = blocks, THREADS, CudaStream.current(device)
    launch_block_kernel(values, words, known, scales, DeviceMemory(parts, "f8", parts.numel()), grid)
    return DeferredRowSum(parts, sum_part_rows)


@functools.cache
def _no_amax(device: torch.device) -> torch.Tensor:
    return torch.zeros((), device=device)


@functools.cache
def _kept(rule: BlockScalingRule, fmt: FloatFormat, dtype: torch.dtype, device: torch.device) -> torch.cuda.Event:
    """Return the event after which a rule's cached tables are on the device. Other streams have to wait for this event."""
    compute_block_scales(rule, torch.zeros((), device=device), fmt, dtype)
    made: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return made


def run_kernel_once(device: torch.device) -> None:
    """Run the kernel once on a device.

    Raises:
        Exception: Numba cannot use the device. The exception may be of many types.
    """
    counts = torch.zeros(BINS, dtype=torch.int64, device=device)
    x = torch.zeros(1, 32, dtype=torch.bfloat16, device=device)
    block_quantization_sums(x, MXFP8Scaling(), "input", E4M3, Histogram(x.dtype, counts))
