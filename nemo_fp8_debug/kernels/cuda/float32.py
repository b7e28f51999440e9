"""Compute the moments of a float32 tensor, and its quantization sums under a scale, on a CUDA device, in one read each.

This module is imported only if there is such a tensor. For each value, the kernels compute bitwise the same terms as the
plain torch operations in `numerics.metrics`, but they add up the terms in another order. In Numba's simulator, the last bit
of a term may differ, because the simulator's `fma` rounds twice.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numba import uint32, uint64

from ...numerics.formats import BF16, E4M3, FloatFormat
from ...numerics.metrics import (
    DeferredRowSum,
    MomentsFound,
    SumsFound,
    ValueMoments,
    compute_float32_moments,
    quantization_sums_of_float32,
)
from ..memory import DeviceMemory
from .histogram import LEAST_BLOCKS
from .launches import CudaKernel, CudaStream, Grid, compile_device_function, count_multiprocessors, cuda
from .sums import SUMS, fold_thread_sums, round_to_code, store_thread_sums, sum_part_rows
from .tile import CodeRounding

#: number of threads in a thread block, a power of two
THREADS = 256
#: number of thread blocks that fit on a multiprocessor, at 32 registers per thread
RESIDENT = 8
#: number of values that a thread loads before it adds the first value, so that enough loads are under way
AT_ONCE = 4
#: number of moments that are sums: NaN, infinities, squares, fourth powers. The largest and smallest magnitude follow them
MOMENTS = 4

_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_TOP, _LOW = 0, 1
_TWICE, _THRICE, _AT_ONCE = np.uint64(2), np.uint64(3), np.uint64(AT_ONCE)
_MOMENTS_ROOM, _SUMS_ROOM = MOMENTS * THREADS, SUMS * THREADS


@compile_device_function
def _nearest_bfloat16(clamped: Any, codes: Any) -> Any:
    """Return the bfloat16 value nearest to a float32 value.

    Round the lower 16 bits in integer arithmetic, because adding an anchor to large values would overflow.
    """
    bits = clamped.view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16) & np.uint32(1))
    return np.uint32(np.uint32(bits + odd + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32)


@compile_device_function
def _add_moments(pattern: Any, so_far: Any) -> Any:
    """Add one value to the moments: NaN, infinities, squares, fourth powers, largest pattern, smallest pattern minus one."""
    nans, infinities, x2, x4, top, low = so_far
    bits = np.uint32(pattern & _MAGNITUDE)
    nans = np.uint32(nans + np.uint32(bits > _INFINITY))
    infinities = np.uint32(infinities + np.uint32(bits == _INFINITY))
    bits = bits if bits < _INFINITY else np.uint32(0)
    # Zero minus one wraps around to the largest pattern.
    top, low = max(top, bits), min(low, np.uint32(bits - np.uint32(1)))
    x = np.float64(bits.view(np.float32))
    square = x * x
    return nans, infinities, x2 + square, x4 + square * square, top, low


@compile_device_function
def _add_up(mine: Any, room: Any, threads: Any, out: Any) -> None:
    """Add up the sums of a block's threads, and write the totals to the block's row of `out`.

    `room` is shared memory that no thread reads any more.
    """
    thread, half = cuda.threadIdx.x, threads >> 1
    store_thread_sums(mine, room, thread, threads)
    while half:
        cuda.syncthreads()
        fold_thread_sums(len(mine), room, thread, half, threads)
        half >>= 1
    if thread == 0:
        for i in range(len(mine)):
            out[cuda.blockIdx.x * len(mine) + i] = room[i * threads].view(np.float64)


@CudaKernel
def _moments(values: Any, out: Any) -> None:
    room = cuda.shared.array(_MOMENTS_ROOM, uint64)
    extremes = cuda.shared.array(2, uint32)
    if cuda.threadIdx.x == 0:
        extremes[_TOP], extremes[_LOW] = np.uint32(0), _INFINITY
    cuda.syncthreads()
    n, i, stride = np.uint64(values.size), np.uint64(cuda.grid(1)), np.uint64(cuda.gridsize(1))
    so_far = np.uint32(0), np.uint32(0), np.float64(0), np.float64(0), np.uint32(0), np.uint32(_INFINITY - np.uint32(1))
    while i + _THRICE * stride < n:
        a, b, c, d = values[i], values[i + stride], values[i + _TWICE * stride], values[i + _THRICE * stride]
        so_far = _add_moments(b, _add_moments(a, so_far))
        so_far = _add_moments(d, _add_moments(c, so_far))
        i += _AT_ONCE * stride
    while i < n:
        so_far = _add_moments(values[i], so_far)
        i += stride
    nans, infinities, x2, x4, top, low = so_far
    cuda.atomic.max(extremes, _TOP, top)
    cuda.atomic.min(extremes, _LOW, np.uint32(low + np.uint32(1)))
    _add_up((np.float64(nans), np.float64(infinities), x2, x4), room, cuda.blockDim.x, out)
    if cuda.threadIdx.x == 0:
        at = MOMENTS * cuda.gridDim.x + cuda.blockIdx.x
        out[at] = np.float64(extremes[_TOP].view(np.float32))
        out[at + cuda.gridDim.x] = np.float64(extremes[_LOW].view(np.float32))


@functools.cache
def _sums_of(is_bfloat16: bool) -> Any:
    """Return the kernel that computes quantization sums, for bfloat16 codes or for codes in another format."""
    cast = _nearest_bfloat16 if is_bfloat16 else round_to_code

    @compile_device_function
    def add(pattern: Any, scale: Any, inverse: Any, codes: Any, so_far: Any) -> Any:
        underflows, overflows, error2, xq, q2 = so_far
        bits = np.uint32(pattern & _MAGNITUDE)
        value = np.uint32(bits if bits < _INFINITY else np.uint32(0)).view(np.float32)  # zero adds nothing to any sum
        scaled = np.float32(value * scale)
        code = cast(min(scaled, codes.limit), codes)
        underflows = np.uint32(underflows + np.uint32(value != 0 and code == 0))
        overflows = np.uint32(overflows + np.uint32(scaled > codes.beyond))
        x, c = np.float64(value), np.float64(code)
        # Compute c / scale, rounded once (Markstein 1990). A division would invert the scale each time, and call a function
        # if c is zero.
        near = c * inverse
        q = cuda.fma(cuda.fma(-near, np.float64(scale), c), inverse, near)
        error = x - q
        return underflows, overflows, error2 + error * error, xq + x * q, q2 + q * q

    @CudaKernel
    def sums(values: Any, scales: Any, codes: Any, out: Any) -> None:
        room = cuda.shared.array(_SUMS_ROOM, uint64)
        scale, inverse = scales[0], 1 / np.float64(scales[0])
        n, i, stride = np.uint64(values.size), np.uint64(cuda.grid(1)), np.uint64(cuda.gridsize(1))
        so_far = np.uint32(0), np.uint32(0), np.float64(0), np.float64(0), np.float64(0)
        while i + _THRICE * stride < n:
            a, b, c, d = values[i], values[i + stride], values[i + _TWICE * stride], values[i + _THRICE * stride]
            so_far = add(b, scale, inverse, codes, add(a, scale, inverse, codes, so_far))
            so_far = add(d, scale, inverse, codes, add(c, scale, inverse, codes, so_far))
            i += _AT_ONCE * stride
        while i < n:
            so_far = add(values[i], scale, inverse, codes, so_far)
            i += stride
        underflows, overflows, error2, xq, q2 = so_far
        mine = np.float64(underflows), np.float64(overflows), error2, xq, q2
        _add_up(mine, room, cuda.blockDim.x, out)

    return sums


def launch_moments(values: Any, out: Any, grid: Grid) -> None:
    """Start the kernel of moments without waiting for it.

    Args:
        values: uint32 [n], the patterns.
        out: float64 [thread blocks * 6], for the results: first a row of 4 sums for each thread block, then the largest
            magnitude of each, then the smallest non-zero magnitude of each, or infinity if there are only zeros.
        grid: size of the launch, and its stream.
    """
    _moments.start(grid, values, out)


def launch_sums(values: Any, scale: Any, fmt: FloatFormat, out: Any, grid: Grid) -> None:
    """Start the kernel of sums without waiting for it.

    Args:
        values: uint32 [n], the patterns.
        scale: float32 [1].
        fmt: format of the codes.
        out: float64 [thread blocks * 5], in which each thread block stores its sums.
        grid: size of the launch, and its stream.
    """
    _sums_of(fmt == BF16).start(grid, values, scale, CodeRounding.from_format(fmt), out)


def moments_of_parts(parts: torch.Tensor, n: int) -> ValueMoments:
    """Return the moments of n values from the output of `launch_moments`, float64 [6 * parts]."""
    blocks = len(parts) // (MOMENTS + 2)
    sums, extremes = parts[: MOMENTS * blocks].view(blocks, MOMENTS).sum(0), parts[MOMENTS * blocks :].view(2, blocks)
    counts, amin = sums[:2].long(), extremes[1].amin()[None]
    return ValueMoments(
        n=n - counts.sum()[None],
        nan=counts[:1],
        inf=counts[1:],
        amax=extremes[0].amax()[None],
        amin=amin.masked_fill(amin == torch.inf, torch.nan),
        median=torch.full_like(amin, torch.nan),
        sum_x2=sums[2:3],
        sum_x4=sums[3:],
    )


def measure_float32_moments(x: torch.Tensor) -> MomentsFound:
    """Return the result of `numerics.metrics.compute_float32_moments`, computed in torch's current stream.

    The first call on a device compiles the kernel.

    Args:
        x: float32, any shape and strides, on a CUDA device.

    Raises:
        ValueError: the tensor's memory was freed. A kernel that reads freed memory would end the run.
    """
    if not x.numel():
        return compute_float32_moments(x)
    values, blocks = _values(x)
    parts = torch.empty(blocks * (MOMENTS + 2), dtype=torch.float64, device=x.device)
    grid = blocks, THREADS, CudaStream.current(x.device)
    launch_moments(DeviceMemory(values, "u4", x.numel()), DeviceMemory(parts, "f8", len(parts)), grid)
    return DeferredRowSum(parts, functools.partial(moments_of_parts, n=x.numel()))


def quantization_sums(x: torch.Tensor, scale: torch.Tensor, fmt: FloatFormat) -> SumsFound:
    """Return the result of `numerics.metrics.quantization_sums_of_float32`, computed in torch's current stream.

    The first call on a device compiles the kernel.

    Args:
        x: float32, any shape and strides, on a CUDA device.
        scale: float32 scalar on that device.
        fmt: format of the codes.

    Raises:
        ValueError: the tensor's memory was freed. A kernel that reads freed memory would end the run.
    """
    if not x.numel():
        return quantization_sums_of_float32(x, scale, fmt)
    values, blocks = _values(x)
    parts = torch.empty(blocks, SUMS, dtype=torch.float64, device=x.device)
    scale = scale.float()
    patterns, out = DeviceMemory(values, "u4", x.numel()), DeviceMemory(parts, "f8", parts.numel())
    launch_sums(patterns, DeviceMemory(scale, "f4", 1), fmt, out, (blocks, THREADS, CudaStream.current(x.device)))
    return DeferredRowSum(parts, sum_part_rows)


def _values(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the values in contiguous memory, and the number of thread blocks to start for them."""
    values = x.detach().contiguous()
    if not values.data_ptr():
        raise ValueError("the memory of the tensor was freed")
    most = RESIDENT * count_multiprocessors(x.device)
    return values, max(LEAST_BLOCKS, min(most, math.ceil(x.numel() / (AT_ONCE * THREADS))))


def run_kernel_once(device: torch.device) -> None:
    """Run the kernel once on a device.

    Raises:
        Exception: Numba cannot use the device. The exception may be of many types.
    """
    x = torch.zeros(32, device=device)
    measure_float32_moments(x)
    quantization_sums(x, torch.ones((), device=device), E4M3)
