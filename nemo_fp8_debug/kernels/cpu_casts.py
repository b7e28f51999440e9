"""The casts of 16 or 32 values at once and the sums of what they lose: by floating point, and by integers where those do.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from ..numerics.figures import SCALE_ROUNDING
from ..numerics.formats import FloatFormat
from .cpu import jit
from .cpu_lanes import (
    COUNTS,
    COUNTS_OF_2,
    COUNTS_OF_3,
    F32,
    F64,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    PAIRED,
    SUMS,
    SUMS_OF_3,
    WORDS,
    call,
    in_lanes,
    load,
    magnitudes_at,
    shuffled,
    splat,
    splatted,
)

#: values whose products `fold` adds up without overflow
SEGMENT = 128


@functools.cache
def digits(fmt: FloatFormat) -> int:
    """Bits of a significand behind its first, of which bfloat16 has 7."""
    return round(math.log2(fmt.min_normal / fmt.min_subnormal))


@functools.cache
def spacing(fmt: FloatFormat) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Limit, what lies beyond it, the lowest binade, and what brings values of a binade to multiples of its spacing.

    See `rounded`.
    """
    anchor = 1.5 * 2.0 ** (23 - digits(fmt))
    return np.float32(fmt.max), np.float32(fmt.max * SCALE_ROUNDING), np.float32(fmt.min_normal), np.float32(anchor)


@jit
def rounded(value: np.float32, lowest: np.float32, anchor: np.float32) -> np.float32:
    """A value, not negative and not beyond a format's limit, cast to the format, of which `spacing` tells the rest.

    Added to 1.5 * 2^23 spacings of the format, float32's own rounding gives a multiple of the spacing.
    """
    exponent = np.int32(np.float32(value).view(np.int32) & 0x7F800000)
    above = max(exponent.view(np.float32), lowest) * anchor
    return (value + above) - above


def _values(builder: Any, address: Any, step: int, half: bool) -> list[Any]:
    """The magnitudes of `step` values in vectors of 16, float32; in an order of their own."""
    if step == LANES:
        magnitude = builder.and_(load(builder, address, ir.VectorType(I16, LANES)), splatted(0x7FFF, I16))
        if half:
            return [builder.fpext(builder.bitcast(magnitude, ir.VectorType(ir.HalfType(), LANES)), FLOATS.vector)]
        return [builder.bitcast(builder.shl(builder.zext(magnitude, COUNTS.vector), splatted(16, I32)), FLOATS.vector)]
    # Two bfloat16 to a word of 32 bits: half of them lie where those of a float32 do.
    pairs = load(builder, address, COUNTS.vector)
    return [
        builder.bitcast(builder.and_(upper, splatted(0x7FFF0000, I32)), FLOATS.vector)
        for upper in (pairs, builder.shl(pairs, splatted(16, I32)))
    ]


@functools.partial(in_lanes, prefer_literal=True)
def cast(
    typing_context: Any, words: Any, scale: Any, spacing: Any, x: Any, q: Any, counts: Any, step: Any, half: Any, clamps: Any
) -> Any:
    """Cast `step` finite values at the address `words`, to `x` (their magnitudes) and `q` (their codes); counts go on.

    Where `clamps` is False, nothing scaled is larger than the format's limit by more than rounding.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        limit, beyond, lowest, anchor = (splat(builder, v) for v in cgutils.unpack_tuple(builder, args[2], 4))
        underflows, overflows = cgutils.unpack_tuple(builder, args[5], 2)
        floats, zero = FLOATS.vector, splatted(0.0, F32)
        for i, value in enumerate(_values(builder, args[0], step.literal_value, half.literal_value)):
            scaled = clamped = builder.fmul(value, splat(builder, args[1]))
            if clamps.literal_value:
                clamped = builder.select(builder.fcmp_ordered("<", scaled, limit), scaled, limit)
            # As in `rounded`.
            exponent = builder.and_(builder.bitcast(clamped, COUNTS.vector), splatted(0x7F800000, I32))
            binade = builder.bitcast(exponent, floats)
            binade = builder.select(builder.fcmp_ordered(">", binade, lowest), binade, lowest)
            above = call(builder, "llvm.fma.v16f32", floats, binade, anchor, clamped)
            code = call(builder, "llvm.fma.v16f32", floats, binade, builder.fneg(anchor), above)
            lost = builder.and_(builder.fcmp_ordered("==", code, zero), builder.fcmp_unordered("!=", value, zero))
            underflows = builder.add(underflows, builder.zext(lost, COUNTS.vector))
            if clamps.literal_value:
                overflow = builder.fcmp_ordered(">", scaled, beyond)
                overflows = builder.add(overflows, builder.zext(overflow, COUNTS.vector))
            for kept, start in ((value, args[3]), (code, args[4])):
                address = builder.add(start, ir.Constant(start.type, 4 * LANES * i))
                builder.store(kept, builder.inttoptr(address, floats.as_pointer()), align=4)
        return context.make_tuple(builder, signature.return_type, [underflows, overflows])

    return COUNTS_OF_2(words, scale, spacing, x, q, counts, step, half, clamps), generate


@in_lanes
def add(typing_context: Any, x: Any, q: Any, scale_inv: Any, sums: Any) -> Any:
    """Add 16 values at the addresses `x` and `q` to the sums of squared errors, of products and of squares."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def doubles(address: Any) -> Any:
            return builder.fpext(load(builder, address, FLOATS.vector), SUMS.vector)

        def plus(a: Any, b: Any, total: Any) -> Any:
            return call(builder, "llvm.fma.v16f64", SUMS.vector, a, b, total)

        error2, xq, q2 = cgutils.unpack_tuple(builder, args[3], 3)
        value, back = doubles(args[0]), builder.fmul(doubles(args[1]), splat(builder, args[2]))
        error = builder.fsub(value, back)
        added = [plus(error, error, error2), plus(value, back, xq), plus(back, back, q2)]
        return context.make_tuple(builder, signature.return_type, added)

    return SUMS_OF_3(x, q, scale_inv, sums), generate


def _products_of_pairs(context: Any, builder: Any, a: Any, b: Any) -> Any:
    """Products of 16-bit integers, those of two neighbours added up; modulo 2^32."""
    _, _, features = context.codegen().magic_tuple()
    if "+avx512bw" in features:  # which LLVM does not find from the products by itself
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", COUNTS.vector, a, b)

    def every_second(v: Any, first: int) -> Any:
        return builder.sext(shuffled(builder, v, v, list(range(first, PAIRED, 2))), COUNTS.vector)

    return builder.add(*(builder.mul(every_second(a, first), every_second(b, first)) for first in (0, 1)))


@in_lanes
def fold(typing_context: Any, words: Any, floor: Any, products: Any, drop: Any) -> Any:
    """Round 32 bfloat16 values to significands shorter by `drop` bits, and add products of integers to `products`.

    Under a scale that is a power of two that is the cast, but for values which become subnormal. Integers are in units of
    the last bit of `floor`, a pattern without significand and not subnormal, from which on values are taken, up to 2^11
    times its value. Errors fit into 16 bits, and codes divided by 2^drop; sums of products hold for `SEGMENT` values.

    Returns:
        Sums of squared errors (unsigned), of errors times codes (signed), of squared codes (unsigned), codes divided by
        2^drop; and whether values other than zero lay below `floor`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def of(value: int) -> Any:
            return splatted(value, I16, PAIRED)

        bits = builder.trunc(args[3], I16)
        digits, half = splat(builder, bits, PAIRED), splat(builder, builder.shl(I16(1), builder.sub(bits, I16(1))), PAIRED)
        magnitude, lowest = magnitudes_at(builder, args[0]), splat(builder, builder.trunc(args[1], I16), PAIRED)
        taken = builder.icmp_unsigned(">=", magnitude, lowest)
        significand = builder.or_(builder.and_(magnitude, of(0x7F)), of(0x80))
        odd = builder.and_(builder.lshr(significand, digits), of(1))
        code = builder.lshr(builder.add(builder.add(significand, builder.sub(half, of(1))), odd), digits)
        error = builder.sub(significand, builder.shl(code, digits))
        binade = builder.lshr(builder.sub(magnitude, lowest), of(7))
        code, error = (builder.select(taken, builder.shl(v, binade), of(0)) for v in (code, error))
        pairs = (error, error), (error, code), (code, code)
        before = cgutils.unpack_tuple(builder, args[2], 3)
        after = [builder.add(b, _products_of_pairs(context, builder, *pair)) for b, pair in zip(before, pairs, strict=True)]
        below = builder.and_(builder.not_(taken), builder.icmp_unsigned("!=", magnitude, of(0)))
        some = call(builder, "llvm.vector.reduce.or.v32i1", ir.IntType(1), below)
        folded = context.make_tuple(builder, COUNTS_OF_3, after)
        return context.make_tuple(builder, signature.return_type, [folded, some])

    return types.Tuple((COUNTS_OF_3, types.boolean))(words, floor, products, drop), generate


@in_lanes
def keep_below(typing_context: Any, words: Any, floor: Any, to: Any) -> Any:
    """Copy the magnitudes of 32 values, with zeros for those that `fold` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude, lowest = magnitudes_at(builder, args[0]), splat(builder, builder.trunc(args[1], I16), PAIRED)
        below = builder.select(builder.icmp_unsigned("<", magnitude, lowest), magnitude, splatted(0, I16, PAIRED))
        builder.store(below, builder.inttoptr(args[2], WORDS.vector.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(words, floor, to), generate


@in_lanes
def add_products(typing_context: Any, products: Any, floor: Any, sums: Any) -> Any:
    """Add what `fold` gave to sums, float64, in their unit: the square of the last bit of `floor`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # A bfloat16 is its significand, an integer, times 2^(exponent - 134).
        exponent = builder.lshr(args[1], I64(7))
        unit2 = builder.shl(builder.add(builder.shl(exponent, I64(1)), I64(1023 - 2 * 134)), I64(52))
        unit2 = splat(builder, builder.bitcast(unit2, F64))
        converts = (builder.uitofp, builder.sitofp, builder.uitofp)
        found, before = (cgutils.unpack_tuple(builder, args[i], 3) for i in (0, 2))
        after = [
            call(builder, "llvm.fma.v16f64", SUMS.vector, convert(integers, SUMS.vector), unit2, total)
            for convert, integers, total in zip(converts, found, before, strict=True)
        ]
        return context.make_tuple(builder, signature.return_type, after)

    return SUMS_OF_3(products, floor, sums), generate
