"""A kernel that reads a 16-bit matrix once and computes the sums behind its quantization metrics, under block scales.

A thread block loads tiles of 128x128 values into shared memory, one after the other. The scaled blocks of every rule divide
a tile without remainder. The threads find the amax of each scaled block, and look up the block's scale in a table with an
entry for each of the 32,768 possible amaxes. Then they add up the values. The threads exchange the amaxes through shared
memory, because warp shuffles would take more instructions and Numba's simulator lacks them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import uint32, uint64

from ...numerics.formats import SCALE_ROUNDING, FloatFormat
from ...numerics.histogram import find_infinity_bin
from .launches import CudaKernel, compile_device_function, cuda
from .sums import fold_thread_sums, round_to_code, store_thread_sums

#: number of binary digits in a float32's mantissa
_DIGITS = 23


class PatternLayout(NamedTuple):
    """How to read the bit patterns of a dtype.

    We shift a magnitude so that its exponent is where float32 has its exponent. Read as float32, the result is the value
    except for a power of two, because the exponents have different biases. This is also true for subnormals.
    """

    #: the pattern of infinity
    infinity: np.uint32
    #: by how many bits to shift, and the power of two to multiply by
    shift: np.uint32
    lift: np.float32

    @classmethod
    def from_dtype(cls, dtype: torch.dtype) -> PatternLayout:
        """Return how to read torch.bfloat16 or torch.float16."""
        kind = torch.finfo(dtype)
        digits, bias = -int(math.log2(kind.eps)), 1 - int(math.log2(kind.tiny))
        return cls(
            np.uint32(find_infinity_bin(dtype)),
            np.uint32(_DIGITS - digits),
            np.float32(2.0 ** (127 - bias)),
        )


class CodeRounding(NamedTuple):
    """How to turn a value into a code.

    If we add 1.5 * 2^23 spacings of the format, float32 rounds the sum to a multiple of the spacing, which gives the code.
    """

    #: the largest value, and the magnitude beyond which values overflow
    limit: np.float32
    beyond: np.float32
    #: smallest normal value, as bits of a float32
    lowest: np.uint32
    #: 1.5 * 2^23 times the spacing of values between 1 and 2
    anchor: np.float32
    one: np.float64

    @classmethod
    def from_format(cls, fmt: FloatFormat) -> CodeRounding:
        """Return how to cast to E4M3, E5M2, E2M1 or FP16. For BF16, only the limits are usable.

        Near BF16's max, 1.5 * 2^23 spacings are beyond float32's range.
        """
        limit = np.float32(fmt.max)
        return cls(
            limit,
            limit * np.float32(SCALE_ROUNDING),
            np.float32(fmt.min_normal).view(np.uint32),
            np.float32(1.5 * 2.0**_DIGITS * fmt.min_subnormal / fmt.min_normal),
            np.float64(1),
        )


#: rows and columns of a tile
TILE = 128
#: number of threads in a thread block: a power of two, at least one warp
THREADS = 256
#: number of neighboring values of a row that one thread handles together. No rule has narrower blocks
STRIP = 16

_STRIPS, _WORDS = TILE // STRIP, STRIP // 4
#: number of words between the starts of two rows of a tile: one more than a row has, so that rows of a warp share no bank
_PITCH = TILE // 4 + 1
_ROOM, _BLOCKS = TILE * _PITCH, TILE * _STRIPS
_MAGNITUDES, _LOWEST_16 = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0xFFFF)


@compile_device_function
def _load(words: Any, row: Any, rows: Any, pitch: Any, place: Any, threads: Any, tile: Any) -> None:
    """Fill a tile with magnitudes, and with zeros beyond the ends of rows. Each warp loads four rows at once."""
    lane, warp, warps = np.uint32(cuda.threadIdx.x & 31), np.uint32(cuda.threadIdx.x >> 5), np.uint32(threads >> 5)
    mask = _MAGNITUDES if place + lane < pitch else np.uint64(0)
    # Beyond the end of the matrix, load its last word, so that no load has to branch. The mask clears columns beyond the
    # end, and nobody reads rows beyond the end.
    corner, last = words[row * pitch + place :], np.uint32((rows - 1) * pitch + min(31, pitch - place - 1))
    r, at, apart, into = warp, np.uint32(warp * pitch + lane), np.uint32(warps * pitch), np.uint64(warp * _PITCH + lane)
    below = np.uint64(warps * _PITCH)
    while r < rows:
        a, b = corner[min(at, last)], corner[min(np.uint32(at + apart), last)]
        c, d = corner[min(np.uint32(at + 2 * apart), last)], corner[min(np.uint32(at + 3 * apart), last)]
        tile[into] = a & mask
        tile[into + below] = b & mask
        tile[into + np.uint64(2) * below] = c & mask
        tile[into + np.uint64(3) * below] = d & mask
        r, at, into = np.uint32(r + 4 * warps), np.uint32(at + 4 * apart), into + np.uint64(4) * below


@compile_device_function
def _gather(values: Any, row: Any, rows: Any, columns: Any, column: Any, threads: Any, tile: Any) -> None:
    """Fill a tile value by value, for a matrix whose rows do not consist of whole words."""
    i = cuda.threadIdx.x
    while i < rows * (TILE // 4):
        r, w = i // (TILE // 4), i % (TILE // 4)
        word, start = np.uint64(0), column + 4 * w
        for k in range(4):
            if start + k < columns:
                word |= np.uint64(values[(row + r) * columns + start + k]) << np.uint64(16 * k)
        tile[np.uint32(r * _PITCH + w)] = word & _MAGNITUDES
        i += threads


@compile_device_function
def _largest(tile: Any, at: Any, infinity: Any) -> Any:
    """Return the largest magnitude of a strip, ignoring NaN. Set non-finite values to zero, which adds nothing to sums."""
    largest = np.uint32(0)
    for w in range(_WORDS):
        word = tile[at + np.uint64(w)]
        for _ in range(4):
            largest = max(largest, np.uint32(word & _LOWEST_16))
            word >>= np.uint64(16)
    return largest if largest < infinity else _without_others(tile, at, infinity)


@compile_device_function
def _without_others(tile: Any, at: Any, infinity: Any) -> Any:
    largest = np.uint32(0)
    for w in range(_WORDS):
        word, kept = tile[at + np.uint64(w)], np.uint64(0)
        for i in range(4):
            pattern = word >> np.uint64(16 * i) & _LOWEST_16
            if pattern <= infinity:
                largest = max(largest, np.uint32(pattern))
            if pattern < infinity:
                kept |= pattern << np.uint64(16 * i)
        tile[at + np.uint64(w)] = kept
    return largest


@compile_device_function
def _add_word(word: Any, scale: Any, scale_inv: Any, nothing: Any, kind: Any, codes: Any, so_far: Any) -> Any:
    """Add the values of one word to the sums: underflows, squared errors, products of values and codes, squared codes."""
    underflows, error2, xc, c2 = so_far
    for _ in range(4):
        pattern = np.uint32(word & _LOWEST_16)
        word >>= np.uint64(16)
        value = np.float32(np.uint32(pattern << kind.shift).view(np.float32) * kind.lift)
        clamped = min(np.float32(value * scale), codes.limit)
        code = round_to_code(clamped, codes)
        underflows = np.uint32(underflows + np.uint32(value != 0 and code <= nothing))
        x, c = np.float64(value), np.float64(code)
        # Multiplying by a runtime value of 1 keeps the compiler from fusing the product into the difference.
        error = cuda.fma(x, codes.one, -(c * scale_inv))
        error2 += error * error
        xc += x * c
        c2 += c * c
    return underflows, error2, xc, c2


@compile_device_function
def _overflows(tile: Any, at: Any, scale: Any, kind: Any, beyond: Any) -> Any:
    overflows = np.uint32(0)
    for w in range(_WORDS):
        word = tile[at + np.uint64(w)]
        for _ in range(4):
            value = np.float32(np.uint32(np.uint32(word & _LOWEST_16) << kind.shift).view(np.float32) * kind.lift)
            overflows = np.uint32(overflows + np.uint32(np.float32(value * scale) > beyond))
            word >>= np.uint64(16)
    return overflows


@compile_device_function
def _sums_of_strip(tile: Any, at: Any, amax: Any, scale: Any, scale_inv: Any, kind: Any, codes: Any) -> Any:
    """Return the sums of a strip, given the amax and the scale of its block."""
    lost = scale_inv == 0  # all codes represent zero, and no value overflows
    nothing = codes.limit if lost else np.float32(0)  # the largest code that represents zero
    so_far = np.uint32(0), np.float64(0), np.float64(0), np.float64(0)
    so_far = _add_word(tile[at], scale, scale_inv, nothing, kind, codes, so_far)
    so_far = _add_word(tile[at + np.uint64(1)], scale, scale_inv, nothing, kind, codes, so_far)
    so_far = _add_word(tile[at + np.uint64(2)], scale, scale_inv, nothing, kind, codes, so_far)
    so_far = _add_word(tile[at + np.uint64(3)], scale, scale_inv, nothing, kind, codes, so_far)
    underflows, error2, xc, c2 = so_far
    overflows = np.uint32(0)
    largest = np.float32(np.uint32(amax << kind.shift).view(np.float32) * kind.lift)
    if not lost and np.float32(largest * scale) > codes.beyond:
        overflows = _overflows(tile, at, scale, kind, codes.beyond)
    # All terms have the same sign, so taking the scale out of the sum loses no accuracy.
    return underflows, overflows, error2, xc * scale_inv, c2 * scale_inv * scale_inv


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


@compile_device_function
def _find_amax(tile: Any, amax: Any, rows: Any, strips: Any, block: Any, threads: Any, infinity: Any) -> None:
    """Find the amax of each block of a tile."""
    i = np.uint32(cuda.threadIdx.x)
    while i < TILE * strips:
        # The threads of a warp read the same strip in different rows, so they use different banks. They also update
        # different scaled blocks, unless blocks are square.
        r, s = np.uint32(i & TILE - 1), np.uint32(i >> 7)
        if r < rows:
            largest = _largest(tile, np.uint64(r * _PITCH + s * _WORDS), infinity)
            cuda.atomic.max(amax, np.uint32((r >> block[0]) * _STRIPS + (s >> block[1])), largest)
        i = np.uint32(i + threads)


@compile_device_function
def _add_tile(
    tile: Any,
    amax: Any,
    rows: Any,
    strips: Any,
    block: Any,
    threads: Any,
    scales: Any,
    scales_inv: Any,
    kind: Any,
    codes: Any,
    so_far: Any,
) -> Any:
    """Add the sums of a thread's strips of a tile to the thread's sums so far."""
    underflows, overflows, error2, xq, q2 = so_far
    i = np.uint32(cuda.threadIdx.x)
    while i < TILE * strips:
        r, s = np.uint32(i & TILE - 1), np.uint32(i >> 7)
        if r < rows:
            of = amax[np.uint32((r >> block[0]) * _STRIPS + (s >> block[1]))]
            u, o, e, x, q = _sums_of_strip(
                tile, np.uint64(r * _PITCH + s * _WORDS), of, scales[of], scales_inv[of], kind, codes
            )
            underflows, overflows = underflows + u, overflows + o
            error2, xq, q2 = error2 + e, xq + x, q2 + q
        i = np.uint32(i + threads)
    return underflows, overflows, error2, xq, q2


@functools.cache
def compile_sum_kernel(kind: PatternLayout, threads: int) -> Any:
    """Compile the kernel for one kind of values and a number of threads. As constants, these cost no instructions.

    `blocks.launch_block_kernel` documents the kernel's arguments.
    """

    @CudaKernel
    def sums(values: Any, words: Any, shape: Any, block: Any, scales: Any, scales_inv: Any, codes: Any, out: Any) -> None:
        tile = cuda.shared.array(_ROOM, uint64)
        amax = cuda.shared.array(_BLOCKS, uint32)
        down, across = np.uint32((shape[0] + TILE - 1) // TILE), np.uint32((shape[1] + TILE - 1) // TILE)
        so_far = np.float64(0), np.float64(0), np.float64(0), np.float64(0), np.float64(0)
        t = np.uint32(cuda.blockIdx.x)
        while t < down * across:
            high = np.uint32(t // across)
            row, column = TILE * np.int64(high), TILE * np.int64(np.uint32(t - high * across))
            rows = np.uint32(min(TILE, shape[0] - row))
            strips = np.uint32(min(_STRIPS, (shape[1] - column + STRIP - 1) // STRIP))
            i = np.uint32(cuda.threadIdx.x)
            while i < _BLOCKS:
                amax[i] = 0
                i = np.uint32(i + threads)
            if words.size:
                _load(words, row, rows, shape[1] >> 2, column >> 2, threads, tile)
            else:
                _gather(values, row, rows, shape[1], column, threads, tile)
            cuda.syncthreads()
            _find_amax(tile, amax, rows, strips, block, threads, kind.infinity)
            cuda.syncthreads()
            so_far = _add_tile(tile, amax, rows, strips, block, threads, scales, scales_inv, kind, codes, so_far)
            cuda.syncthreads()
            t = np.uint32(t + cuda.gridDim.x)
        _add_up(so_far, tile, threads, out)

    return sums
