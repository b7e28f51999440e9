"""Cast all values of a tensor to an 8-bit format and back, in one read and one write, and compute the amax.

Numba's cache of machine code checks only the date of the file that contains a loop. After a change here, also save the files
that import this module, so that Numba compiles their loops again.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba.np.numpy_support import carray

from ...numerics.formats import FloatFormat
from .jit import JOB, CompiledJob, compile_job, counts_at, floats_at, jit, take_next_share, values_at, view_job_numbers
from .jit import counters_at as words_at
from .threads import run_job_shares

Words = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
#: the scale, its reciprocal, and three results of `compute_rounding_constants`: the largest value, the smallest normal
#: value and the anchor
_By = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]

#: dtypes that have a compiled loop
DTYPES = (torch.bfloat16, torch.float32)
#: least number of values for each thread
GRAIN = 1 << 16


@functools.cache
def compute_rounding_constants(fmt: FloatFormat) -> Floats:
    """Return four numbers: a format's largest value, the magnitude beyond which values overflow, its smallest normal value,
    and the anchor.

    The anchor is 1.5 * 2^23 times the spacing of the format's values between 1 and 2, see `round_to_format`.
    """
    anchor = 1.5 * 2.0**23 * fmt.min_subnormal / fmt.min_normal
    return np.array([fmt.max, fmt.overflow_limit, fmt.min_normal, anchor], np.float32)


@jit
def round_to_format(value: np.float32, lowest: np.float32, anchor: np.float32) -> np.float32:
    """Round a value to the format of these rounding constants. The value must be between 0 and the format's largest value.

    If we add 1.5 * 2^23 spacings of the format, float32 rounds the sum to a multiple of the spacing.
    """
    exponent = np.int32(np.float32(value).view(np.int32) & 0x7F800000)
    above = max(exponent.view(np.float32), lowest) * anchor
    return (value + above) - above


def quantize_dequantize(x: torch.Tensor, scale: float, scale_inv: float, fmt: FloatFormat, threads: int) -> torch.Tensor:
    """Return the same values, to the bit, as `numerics.tensor_scaling.quantize_dequantize`.

    Args:
        x: non-empty tensor without gaps in its memory, of a dtype in `DTYPES`.
        scale: a float32 value.
        scale_inv: float32 reciprocal of the scale.
        fmt: an 8-bit format.
        threads: largest number of threads that run at once.
    """
    out = torch.empty_like(x)
    limit, _, lowest, anchor = compute_rounding_constants(fmt)
    floats = np.array([scale, scale_inv, limit, lowest, anchor], np.float32)
    numbers = x.data_ptr(), out.data_ptr(), x.numel(), floats.ctypes.data
    run_job_shares(_casting(x.dtype), numbers, _shares(x, threads))
    return out


def amax(x: torch.Tensor, threads: int) -> torch.Tensor:
    """Return the same value as `numerics.metrics.compute_amax`. `x` must be as in `quantize_dequantize`."""
    shares = _shares(x, threads)
    job = run_job_shares(_reading(x.dtype), (x.data_ptr(), x.numel()), shares, 1)
    pattern = max(job[JOB:])
    bits = pattern << 16 if x.dtype == torch.bfloat16 else pattern
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def _shares(x: torch.Tensor, threads: int) -> int:
    return min(threads, -(-x.numel() // GRAIN))


@functools.cache
def _casting(dtype: torch.dtype) -> CompiledJob:
    values, loop = (values_at, _cast_bfloat16) if dtype == torch.bfloat16 else (floats_at, _cast_float32)

    @compile_job
    def cast(job: int) -> None:
        numbers = carray(counts_at(job), JOB)
        shares, n = numbers[1], numbers[4]
        x, out = carray(values(numbers[2]), n), carray(values(numbers[3]), n)
        by = carray(floats_at(numbers[5]), 5)
        while True:
            share = take_next_share(job)
            if share >= shares:
                return
            start, end = n * share // shares, n * (share + 1) // shares
            loop(x[start:end], out[start:end], (by[0], by[1], by[2], by[3], by[4]))

    return cast


@functools.cache
def _reading(dtype: torch.dtype) -> CompiledJob:
    half = dtype == torch.bfloat16
    values = values_at if half else words_at
    sign, infinity = (np.uint16(0x8000), np.uint16(0x7F80)) if half else (np.uint32(0x80000000), np.uint32(0x7F800000))

    @compile_job
    def read(job: int) -> None:
        numbers = carray(counts_at(job), JOB + view_job_numbers(job)[1])
        shares, n = numbers[1], numbers[3]
        x = carray(values(numbers[2]), n)
        while True:
            share = take_next_share(job)
            if share >= shares:
                return
            numbers[JOB + share] = find_largest_pattern(x[n * share // shares : n * (share + 1) // shares], sign, infinity)

    return read


@jit
def _cast_bfloat16(x: Words, out: Words, by: _By) -> None:
    scale, scale_inv, limit, lowest, anchor = by
    for i in range(x.size):
        pattern = np.uint32(x[i])
        value = np.uint32((pattern & np.uint32(0x7FFF)) << np.uint32(16)).view(np.float32) * scale
        value = limit if value > limit else value
        bits = np.float32(round_to_format(value, lowest, anchor) * scale_inv).view(np.uint32)
        # Round to the nearest bfloat16, ties to even. NaN is handled separately, because rounding would make it infinity.
        nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nearest = np.uint32(0x7FC0) if bits > np.uint32(0x7F800000) else nearest
        out[i] = nearest | (pattern & np.uint32(0x8000))


@jit
def _cast_float32(x: Floats, out: Floats, by: _By) -> None:
    scale, scale_inv, limit, lowest, anchor = by
    for i in range(x.size):
        value = abs(x[i]) * scale
        value = limit if value > limit else value
        out[i] = np.copysign(round_to_format(value, lowest, anchor) * scale_inv, x[i])


@jit
def find_largest_pattern(x: Words, sign: Any, infinity: Any) -> int:
    """Return the largest magnitude pattern, ignoring NaN. `sign` and `infinity` have the same integer type as the words."""
    top = sign ^ sign
    for i in range(x.size):
        magnitude = x[i] & ~sign
        top = max(top, magnitude if magnitude <= infinity else sign ^ sign)
    return top  # type: ignore[no-any-return]
