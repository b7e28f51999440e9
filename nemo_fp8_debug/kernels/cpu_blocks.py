"""The amax of each block of a matrix in CPU memory, and the sums of its error under block scales, in one pass each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..numerics.blocks import Block, BlockScales
from ..numerics.figures import SCALE_ROUNDING, QuantizationSums
from ..numerics.formats import FloatFormat
from .cpu import jit, pool
from .memory import bits_of

T = TypeVar("T")
Words = npt.NDArray[Any]  # uint16 or uint32 [rows, columns]

#: values handled at once: they stay in a cache, and their scales are too few for torch's threads, which wait for one another
CHUNK = 1 << 19
#: values that one thread gets at the least
GRAIN = 1 << 17

_MAGNITUDE, _INFINITY, _ZERO = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0)
#: digits of a float32's mantissa, and the first of them
_DIGITS, _HALF = np.uint32(23), np.uint32(1 << 22)


@intrinsic
def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 that 32 bits are."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _bits_of(typing_context: Any, value: Any) -> Any:
    """The 32 bits that a float32 is."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@jit
def _amax(words: Words, shift: int, high: int, wide: int, amax: npt.NDArray[np.uint32]) -> None:
    rows, columns = words.shape
    for r in range(rows):
        for b in range(amax.shape[1]):
            largest = _ZERO
            for c in range(b * wide, min(columns, b * wide + wide)):
                magnitude = np.uint32((np.uint32(words[r, c]) << shift) & _MAGNITUDE)
                largest = max(largest, magnitude if magnitude <= _INFINITY else _ZERO)
            amax[r // high, b] = max(amax[r // high, b], largest)


def _add(x: npt.NDArray[np.float32], q: npt.NDArray[np.float64], sums: npt.NDArray[np.float64]) -> None:
    error2 = xq = q2 = 0.0
    for i in range(x.size):
        value = np.float64(x[i])
        error = value - q[i]
        error2 += error * error
        xq += value * q[i]
        q2 += q[i] * q[i]
    sums[0] += error2
    sums[1] += xq
    sums[2] += q2


# Sums in any order, which makes them several at a time; nothing else may be rearranged, so this is a function of its own.
_add = jit(_add, fastmath={"reassoc"})


@jit
def _quantize(
    words: Words,
    shift: int,
    scale: np.float32,
    scale_inv: np.float64,
    limit: np.float32,
    beyond: np.float32,
    lowest: np.uint32,
    digits: np.uint32,
    x: npt.NDArray[np.float32],
    q: npt.NDArray[np.float64],
) -> tuple[int, int]:
    underflows = overflows = 0
    for i in range(words.size):
        magnitude = np.uint32((np.uint32(words[i]) << shift) & _MAGNITUDE)
        value: Any = _float_of(magnitude if magnitude < _INFINITY else _ZERO)  # type: ignore[call-arg]
        scaled = value * scale
        clamped = scaled if scaled < limit else limit
        # Added to 1.5 * 2^23 spacings of the format, float32's own rounding gives a multiple of the spacing.
        exponent = max(np.uint32(_bits_of(clamped) >> _DIGITS), lowest)
        anchor = _float_of(np.uint32(((exponent + _DIGITS - digits) << _DIGITS) | _HALF))
        back = np.float64((clamped + anchor) - anchor) * scale_inv
        underflows += (value != 0) & (back == 0)
        overflows += (scaled > beyond) & (back != 0)
        x[i] = value
        q[i] = back
    return underflows, overflows


@jit
def _sums(
    words: Words,
    shift: int,
    high: int,
    wide: int,
    scale: npt.NDArray[np.float32],
    scale_inv: npt.NDArray[np.float64],
    limit: np.float32,
    beyond: np.float32,
    lowest: np.uint32,
    digits: np.uint32,
    counts: npt.NDArray[np.int64],
    sums: npt.NDArray[np.float64],
) -> None:
    rows, columns = words.shape
    x, q = np.empty(columns, np.float32), np.empty(columns, np.float64)
    for r in range(rows):
        for b in range(scale.shape[1]):
            start, end = b * wide, min(columns, b * wide + wide)
            underflows, overflows = _quantize(
                words[r, start:end],
                shift,
                scale[r // high, b],
                scale_inv[r // high, b],
                limit,
                beyond,
                lowest,
                digits,
                x[start:end],
                q[start:end],
            )
            counts[0] += underflows
            counts[1] += overflows
        _add(x, q, sums)


def _words(x: torch.Tensor) -> tuple[Words, int]:
    """A matrix as it lies in memory, and how far left its bits are to be shifted to be those of a float32."""
    if x.dtype == torch.bfloat16:
        return bits_of(x), 16
    return bits_of(x.float()), 0


def _shared_out(task: Callable[[slice], T], blocks: int, values: int) -> list[T]:
    """What `task` gives for each thread's share of so many rows of blocks; the first share is done in this thread."""
    threads = torch.get_num_threads()
    shares = max(1, min(threads, blocks, values // GRAIN))
    mine, *others = [slice(blocks * i // shares, blocks * (i + 1) // shares) for i in range(shares)]
    jobs = [pool(threads).submit(task, share) for share in others]
    return [task(mine), *(job.result() for job in jobs)]


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """As `numerics.blocks.block_amax`, of a matrix in CPU memory."""
    (words, shift), (high, wide) = _words(x), block
    rows, columns = words.shape
    amax = np.zeros((math.ceil(rows / high), math.ceil(columns / wide)), np.uint32)

    def of(share: slice) -> None:
        _amax(words[share.start * high : share.stop * high], shift, high, wide, amax[share])

    _shared_out(of, len(amax), words.size)
    return torch.from_numpy(amax.view(np.float32))


def block_sums(x: torch.Tensor, scales: BlockScales, block: Block, fmt: FloatFormat) -> QuantizationSums:
    """As `numerics.blocks.block_sums`, of a matrix in CPU memory; sums are added up in another order."""
    (words, shift), (high, wide) = _words(x), block
    scale, scale_inv = scales.scale.numpy(), scales.scale_inv.numpy()
    limit, rounding = np.float32(fmt.max), np.float32(SCALE_ROUNDING)
    lowest, digits = 127 + math.log2(fmt.min_normal), math.log2(fmt.min_normal / fmt.min_subnormal)
    spacing = limit, limit * rounding, np.uint32(lowest), np.uint32(digits)

    def of(share: slice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        counts, sums = np.zeros(2, np.int64), np.zeros(3, np.float64)
        mine = words[share.start * high : share.stop * high]
        _sums(mine, shift, high, wide, scale[share], scale_inv[share], *spacing, counts, sums)
        return counts, sums

    counts, sums = map(sum, zip(*_shared_out(of, len(scale), words.size), strict=True))
    return QuantizationSums(*torch.from_numpy(counts)[:, None], *torch.from_numpy(sums)[:, None])
