"""Compute the quantization sums of a 16-bit operand under block scales, in CPU memory.

The amax of a block is one of the 32,768 magnitudes of its dtype, so we look up the block's scale in a table. Each thread
takes a share of the blocks. Loops have no calls and no branches, so that LLVM turns them into vector instructions.

Numba's cache of machine code checks only the date of the file that contains a loop. After a change here, also save the files
that import this module, so that Numba compiles their loops again.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numba.np.numpy_support import carray

from ...numerics.block_scaling import WHOLE_ROW, BlockScalingRule, compute_block_scales, view_as_matrix
from ...numerics.formats import FloatFormat
from ...numerics.histogram import BINS, Histogram, compute_bin_magnitudes, find_infinity_bin
from ...numerics.metrics import QuantizationSums
from ..memory import read_address
from .histogram import list_occupied_bins
from .jit import (
    JOB,
    CompiledJob,
    compile_job,
    counts_at,
    doubles_at,
    floats_at,
    jit,
    take_next_share,
    values_at,
    view_job_numbers,
)
from .quantize import compute_rounding_constants, find_largest_pattern, round_to_format
from .threads import run_job_shares

#: least number of values for each thread
GRAIN = 1 << 18
#: how many numbers each share writes: underflows, overflows, and three sums as float64
_RESULTS = 5


def block_quantization_sums(
    x: torch.Tensor, rule: BlockScalingRule, role: str, fmt: FloatFormat, counted: Histogram
) -> QuantizationSums:
    """Return the result of `numerics.block_scaling.quantization_sums_in_blocks`, added up in another order.

    Args:
        x: bfloat16 or float16, not empty, in CPU memory.
        counted: the histogram of `x`.
    """
    high, wide = rule.get_block_shape(role)
    columns = x.shape[-1] if x.dim() else 1
    rows, stride, kept = x.numel() // columns, columns, x
    if not x.is_contiguous():
        kept = view_as_matrix(x)
        if kept.stride(1) != 1:
            kept = kept.contiguous()
        stride = kept.stride(0) if rows > 1 else columns
    blocks = math.ceil(rows / high) * math.ceil(columns / wide)
    first, last = (
        find_occupied_bounds(counted.counts.data_ptr(), find_infinity_bin(x.dtype)) if rule.two_level else (0, BINS - 1)
    )
    whole = compute_bin_magnitudes(x.dtype, torch.device("cpu"))[last]
    scales = compute_block_scales(rule, whole, fmt, x.dtype, slice(first, last + 1))
    tables = (
        first,
        last + 1 - first,
        scales.scale.data_ptr(),
        scales.scale_inv.data_ptr(),
        compute_rounding_constants(fmt).ctypes.data,
    )
    shares = max(1, min(torch.get_num_threads(), blocks, kept.numel() // GRAIN))
    loop = _sums_of_blocks(0 if wide == WHOLE_ROW else wide, x.dtype == torch.float16)
    job = run_job_shares(loop, (read_address(kept), rows, columns, stride, high, blocks, *tables), shares, _RESULTS)
    results = np.frombuffer(job, np.int64)[JOB:].reshape(shares, _RESULTS)
    counts, sums = results[:, :2].sum(0), results[:, 2:].view(np.float64).sum(0)
    return QuantizationSums(*torch.from_numpy(counts).split(1), *torch.from_numpy(sums).split(1))


@jit
def find_occupied_bounds(address: int, infinity: int) -> tuple[int, int]:
    """Return the first and the last occupied bin, ignoring the bins of zero and NaN. Return (0, 0) if none is left."""
    bins, counts = np.empty(BINS, np.int64), np.empty(BINS, np.int64)
    end, first = list_occupied_bins(address, bins, counts), 0
    while end and bins[end - 1] > infinity:
        end -= 1
    if end and not bins[0]:
        first = 1
    return (bins[first], bins[end - 1]) if first < end else (0, 0)


@functools.cache
def _sums_of_blocks(wide: int, half: bool) -> CompiledJob:
    """Compile the loop over blocks of width `wide`, or over blocks of whole rows if `wide` is 0.

    `half` selects float16 instead of bfloat16.
    """
    infinity = np.uint16(find_infinity_bin(torch.float16 if half else torch.bfloat16))

    @compile_job
    def add_up_blocks(job: int) -> None:
        numbers = view_job_numbers(job)
        shares, address, rows, columns, stride, high = numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]
        blocks, first, n = numbers[7], numbers[8], numbers[9]
        tables = carray(floats_at(numbers[10]), n), carray(doubles_at(numbers[11]), n), first
        by = carray(floats_at(numbers[12]), 4)
        limits, width = (by[0], by[1], by[2], by[3]), wide if wide else columns
        across = (columns + width - 1) // width
        while True:
            share = take_next_share(job)
            if share >= shares:
                return
            begin, end = blocks * share // shares, blocks * (share + 1) // shares
            row, column = begin // across * high, begin % across * width
            underflows, overflows, error2, xq, q2 = 0, 0, 0.0, 0.0, 0.0
            for _ in range(begin, end):
                at, tall, left = address + 2 * (row * stride + column), min(high, rows - row), columns - column
                if wide and left >= wide:  # the compiler knows this length
                    found = _sums_of_block(at, stride, tall, wide, infinity, half, tables, limits)
                else:
                    found = _sums_of_block(at, stride, tall, min(width, left), infinity, half, tables, limits)
                underflows, overflows, error2 = underflows + found[0], overflows + found[1], error2 + found[2]
                xq, q2 = xq + found[3], q2 + found[4]
                column += width
                if column >= columns:
                    row, column = row + high, 0
            results = job + 8 * (JOB + _RESULTS * share)
            counts, sums = carray(counts_at(results), 2), carray(doubles_at(results + 16), 3)
            counts[0], counts[1], sums[0], sums[1], sums[2] = underflows, overflows, error2, xq, q2

    return add_up_blocks


@functools.partial(jit, forceinline=True, fastmath={"reassoc"})
def _sums_of_block(  # type: ignore[no-untyped-def]
    address, stride, rows, columns, infinity, half, tables, limits
):
    """Return the counts and sums of `QuantizationSums` over the finite values of a block."""
    (scales, inverses, first), (limit, beyond, lowest, anchor) = tables, limits
    amax = np.uint16(0)
    for r in range(rows):
        words = carray(values_at(address + 2 * r * stride), columns)
        amax = max(amax, find_largest_pattern(words, np.uint16(0x8000), infinity))
    entry = np.int64(amax) - first
    underflows, overflows, error2, xq, q2 = np.uint32(0), np.uint32(0), 0.0, 0.0, 0.0
    if not amax or not 0 <= entry < scales.size:
        return underflows, overflows, error2, xq, q2
    # If a block's stored scale rounds to zero, its codes represent zero. Its values count as underflows, not overflows.
    scale_inv = inverses[entry]
    scale = scales[entry] if scale_inv else np.float32(0)
    for r in range(rows):
        words = carray(values_at(address + 2 * r * stride), columns)
        for i in range(columns):
            pattern = np.uint16(words[i] & np.uint16(0x7FFF))
            x = _value_of(pattern if pattern < infinity else np.uint16(0), half)
            scaled = x * scale
            code = round_to_format(limit if scaled > limit else scaled, lowest, anchor)
            value, q = np.float64(x), np.float64(code) * scale_inv
            error = value - q
            underflows = np.uint32(underflows + ((code == 0) & (x != 0)))
            overflows = np.uint32(overflows + (scaled > beyond))
            error2 += error * error
            xq += value * q
            q2 += q * q
    return underflows, overflows, error2, xq, q2


@functools.partial(jit, forceinline=True)
def _value_of(pattern, half):  # type: ignore[no-untyped-def]
    """Return the value of a magnitude's bit pattern.

    Avoid subnormal float32 intermediates, because torch may flush them to zero.
    """
    bits = np.uint32(pattern)
    if not half:
        return np.uint32(bits << np.uint32(16)).view(np.float32)
    if bits < np.uint32(1 << 10):
        return np.float32(np.int32(bits)) * np.float32(2.0**-24)
    return np.uint32((bits << np.uint32(13)) + np.uint32(112 << 23)).view(np.float32)
