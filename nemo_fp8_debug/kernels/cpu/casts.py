"""The casts of 16 or 32 values at once and the sums of what they lose.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from ...numerics.formats import FloatFormat
from ...numerics.metrics import SCALE_ROUNDING
from .jit import instruction, jit
from .simd import COUNTS, FLOATS, I16, I32, I64, LANES, SUMS, SUMS_OF_3, WORDS, call, load, splat, splatted


@functools.cache
def digits(fmt: FloatFormat) -> int:
    """Bits of a significand behind its first, of which bfloat16 has 7."""
    return round(math.log2(fmt.min_normal / fmt.min_subnormal))


@functools.cache
def spacing(fmt: FloatFormat) -> npt.NDArray[np.float32]:
    """[4]: limit, what lies beyond it, the lowest binade, and what brings values of a binade to multiples of its spacing.

    See `rounded`.
    """
    anchor = 1.5 * 2.0 ** (23 - digits(fmt))
    return np.array([fmt.max, fmt.max * SCALE_ROUNDING, fmt.min_normal, anchor], np.float32)


@jit
def rounded(value: np.float32, lowest: np.float32, anchor: np.float32) -> np.float32:
    """A value, not negative and not beyond a format's limit, cast to the format, of which `spacing` tells the rest.

    Added to 1.5 * 2^23 spacings of the format, float32's own rounding gives a multiple of the spacing.
    """
    exponent = np.int32(np.float32(value).view(np.int32) & 0x7F800000)
    above = max(exponent.view(np.float32), lowest) * anchor
    return (value + above) - above


def _values(builder: Any, address: Any, half: bool, count: int) -> tuple[Any, list[Any]]:
    """The magnitudes of 16 float16, or of 16 or 32 bfloat16: patterns, and in vectors of 16 float32.

    Of 32 the order is another one.
    """
    if count == LANES:
        patterns = builder.and_(load(builder, address, ir.VectorType(I16, LANES)), splatted(0x7FFF, I16))
        if half:
            return patterns, [builder.fpext(builder.bitcast(patterns, ir.VectorType(ir.HalfType(), LANES)), FLOATS.vector)]
        upper = builder.shl(builder.zext(patterns, COUNTS.vector), splatted(16, I32))
        return patterns, [builder.bitcast(upper, FLOATS.vector)]
    # Two bfloat16 to a word of 32 bits: half of them lie where those of a float32 do.
    pairs = builder.and_(load(builder, address, COUNTS.vector), splatted(0x7FFF7FFF, I32))
    both = builder.and_(pairs, splatted(0xFFFF0000, I32)), builder.shl(pairs, splatted(16, I32))
    return builder.bitcast(pairs, WORDS.vector), [builder.bitcast(v, FLOATS.vector) for v in both]


def _how_many(builder: Any, lanes: Any, length: int) -> Any:
    return builder.zext(builder.ctpop(builder.bitcast(lanes, ir.IntType(length))), I64)


@functools.partial(instruction, prefer_literal=True)
def cast(
    typing_context: Any,
    words: Any,
    scale: Any,
    lost: Any,
    spacing: Any,
    x: Any,
    q: Any,
    counts: Any,
    half: Any,
    count: Any,
    clamps: Any,
) -> Any:
    """Cast finite values of one block at the address `words`, 16 or as `count` says 32, to `x` (magnitudes) and `q` (codes).

    `scale` and `lost`, the largest pattern that is cast to zero, are those of the block. Where `clamps` is False, nothing
    scaled is larger than the format's limit by more than rounding. Counts of underflows and overflows go on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of_half, lanes, with_limit = (of.literal_value for of in signature.args[7:])
        limit, beyond, lowest, anchor = (splat(builder, v) for v in cgutils.unpack_tuple(builder, args[3], 4))
        patterns, values = _values(builder, args[0], of_half, lanes)
        by = splat(builder, args[1])
        underflows, overflows = cgutils.unpack_tuple(builder, args[6], 2)
        but_zero = builder.sub(patterns, splatted(1, I16, lanes))
        gone = builder.icmp_unsigned("<", but_zero, splat(builder, args[2], lanes))
        underflows = builder.add(underflows, _how_many(builder, gone, lanes))
        floats = FLOATS.vector
        for i, value in enumerate(values):
            scaled = clamped = builder.fmul(value, by)
            if with_limit:
                clamped = builder.select(builder.fcmp_ordered("<", scaled, limit), scaled, limit)
                overflow = builder.fcmp_ordered(">", scaled, beyond)
                overflows = builder.add(overflows, _how_many(builder, overflow, LANES))
            # As in `rounded`.
            exponent = builder.and_(builder.bitcast(clamped, COUNTS.vector), splatted(0x7F800000, I32))
            binade = builder.bitcast(exponent, floats)
            binade = builder.select(builder.fcmp_ordered(">", binade, lowest), binade, lowest)
            above = call(builder, "llvm.fma.v16f32", floats, binade, anchor, clamped)
            code = call(builder, "llvm.fma.v16f32", floats, binade, builder.fneg(anchor), above)
            for kept, start in ((value, args[4]), (code, args[5])):
                address = builder.add(start, ir.Constant(start.type, 4 * LANES * i))
                builder.store(kept, builder.inttoptr(address, floats.as_pointer()), align=4)
        return context.make_tuple(builder, signature.return_type, [underflows, overflows])

    return types.UniTuple(types.int64, 2)(words, scale, lost, spacing, x, q, counts, half, count, clamps), generate


@instruction
def add(typing_context: Any, x: Any, q: Any, scale_inv: Any, sums: Any) -> Any:
    """Add 16 values at the addresses `x` and `q` to the sums of squared errors, of products and of squares.

    All belong to the block of `scale_inv`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def doubles(address: Any) -> Any:
            return builder.fpext(load(builder, address, FLOATS.vector), SUMS.vector)

        def plus(a: Any, b: Any, total: Any) -> Any:
            return call(builder, "llvm.fma.v16f64", SUMS.vector, a, b, total)

        inverse = splat(builder, args[2])
        error2, xq, q2 = cgutils.unpack_tuple(builder, args[3], 3)
        value, back = doubles(args[0]), builder.fmul(doubles(args[1]), inverse)
        error = builder.fsub(value, back)
        added = [plus(error, error, error2), plus(value, back, xq), plus(back, back, q2)]
        return context.make_tuple(builder, signature.return_type, added)

    return SUMS_OF_3(x, q, scale_inv, sums), generate
