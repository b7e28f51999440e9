"""Vectors of LLVM's in Numba, which has none: what the loops over blocks do with 16 or 32 values at a time.

Machine code that is kept on disk is dated by the file of its loop: who changes this file saves those that import it as well.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import models, register_model

from .jit import instruction

#: values that `amaxes` takes at once
PANEL = 1024

LANES, PAIRED = 16, 32
I16, I32, I64, F32, F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


class _Lanes(types.Type):
    """A vector of LLVM's as a type of Numba's, which has none."""

    def __init__(self, element: ir.Type, length: int = LANES) -> None:
        self.vector = ir.VectorType(element, length)
        super().__init__(f"Lanes({self.vector})")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: _Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)  # type: ignore[no-untyped-call]


FLOATS, COUNTS, SUMS, WORDS = _Lanes(F32), _Lanes(I32), _Lanes(F64), _Lanes(I16, PAIRED)
SUMS_OF_3 = types.UniTuple(SUMS, 3)


def splatted(value: Any, element: ir.Type, length: int = LANES) -> ir.Constant:
    """A constant in all lanes."""
    return ir.Constant(ir.VectorType(element, length), [value] * length)


def splat(builder: Any, value: Any, length: int = LANES) -> Any:
    """A number in all lanes."""
    vector = ir.VectorType(value.type, length)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), splatted(0, I32, length))


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, one behind the other, by number."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def load(builder: Any, address: Any, vector: ir.Type) -> Any:
    """A vector at an address."""
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def call(builder: Any, name: str, result: ir.Type, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """One of LLVM's own functions."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=fastmath)


@instruction
def no_sums(typing_context: Any) -> Any:
    """Three vectors of zeros."""
    return SUMS_OF_3(), lambda context, *_: ir.Constant(context.get_value_type(SUMS_OF_3), None)


@instruction
def total(typing_context: Any, lanes: Any) -> Any:
    """All lanes added up, in any order."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return call(builder, "llvm.vector.reduce.fadd.v16f64", F64, F64(0.0), *args, fastmath=("reassoc",))

    return types.float64(lanes), generate


@instruction
def patterns(typing_context: Any, address: Any) -> Any:
    """32 words at an address."""
    return WORDS(address), lambda _, builder, __, args: load(builder, args[0], WORDS.vector)


@instruction
def magnitudes(typing_context: Any, address: Any) -> Any:
    """The patterns of 32 values at an address, without their signs."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return magnitudes_at(builder, args[0])

    return WORDS(address), generate


def magnitudes_at(builder: Any, address: Any) -> Any:
    """The patterns of 32 values at an address, without their signs."""
    return builder.and_(load(builder, address, WORDS.vector), splatted(0x7FFF, I16, PAIRED))


@instruction
def store(typing_context: Any, words: Any, address: Any) -> Any:
    """Write 32 words to an address."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], WORDS.vector.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(words, address), generate


@instruction
def below(typing_context: Any, address: Any, floor: Any) -> Any:
    """Which of 32 values at an address are not zero and at most so large, a pattern given twice in 32 bits; a bit each."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        but_zero = builder.sub(magnitudes_at(builder, args[0]), splatted(1, I16, PAIRED))
        floors = builder.bitcast(splat(builder, args[1]), WORDS.vector)
        return builder.bitcast(builder.icmp_unsigned("<", but_zero, floors), I32)

    return types.uint32(address, types.uint32), generate


@instruction
def lowest_bit(typing_context: Any, bits: Any) -> Any:
    """Its number."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), generate


@functools.partial(instruction, prefer_literal=True)
def magnitude_of(typing_context: Any, pattern: Any, half: Any) -> Any:
    """What a pattern stands for, of a float16 or else of a bfloat16."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1].literal_value:
            return builder.fpext(builder.bitcast(builder.trunc(args[0], I16), ir.HalfType()), F32)
        return builder.bitcast(builder.shl(builder.trunc(args[0], I32), I32(16)), F32)

    return types.float32(pattern, half), generate


@instruction
def larger(typing_context: Any, a: Any, b: Any) -> Any:
    """Lane by lane, of unsigned words."""
    return a(a, b), lambda _, builder, __, args: _larger(builder, *args)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


@instruction
def largest(typing_context: Any, words: Any) -> Any:
    """Of all lanes, unsigned."""
    return types.uint16(words), lambda _, builder, __, args: call(builder, "llvm.vector.reduce.umax.v32i16", I16, *args)


_Blocks = npt.NDArray[np.int64]

#: lanes of two vectors, one behind the other, of which neighbors fall together: in 32-bit words, and in 128 bits
_EVEN_WORDS = [16 * (j // 2 % 2) + 4 * i + 2 * (j % 2) for i in range(4) for j in range(4)]
_EVEN_QUARTERS = [8 * i + j for i in range(4) for j in range(4)]


@functools.partial(instruction, prefer_literal=True)
def amaxes(typing_context: Any, address: Any, to: Any, wide: Any) -> Any:
    """Store the patterns of the largest magnitudes of `PANEL` values, of each block; NaN counts as the largest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = signature.args[2].literal_value
        blocks = PANEL // wide

        def larger_words(a: Any, b: Any) -> Any:
            return builder.bitcast(_larger(builder, *(builder.bitcast(v, WORDS.vector) for v in (a, b))), COUNTS.vector)

        def together(a: Any, of_a: _Blocks, b: Any, of_b: _Blocks) -> tuple[Any, _Blocks]:
            if a is not b and (of_a == of_b).all():
                return larger_words(a, b), of_a
            of = np.concatenate([of_a, of_b])
            for even, apart in ((_EVEN_WORDS, 1), (_EVEN_QUARTERS, 4)):
                odd = [lane + apart for lane in even]
                if (of[even] == of[odd]).all():
                    return larger_words(*(shuffled(builder, a, b, lanes) for lanes in (even, odd))), of[even]
            raise AssertionError("neighbors belong to one block")

        def read(first: int, count: int) -> tuple[Any, _Blocks]:
            """The maxima of words, and of which block: of so many vectors from the first on."""
            if count == 1:
                at = builder.add(args[0], ir.Constant(args[0].type, 64 * first))
                word = builder.and_(load(builder, at, COUNTS.vector), splatted(0x7FFF7FFF, I32))
                return word, (np.arange(16) + 16 * first) * 2 // wide
            (a, of_a), (b, of_b) = read(first, count // 2), read(first + count // 2, count // 2)
            return together(a, of_a, b, of_b)

        each = 32 // max(1, blocks // 16)
        for first in range(0, 32, each):
            words, of = read(first, each)
            # What is left of a block lies in neighboring lanes, or in the halves of a word.
            count, start = min(blocks, 16), int(of.min())
            for _ in range((16 // count).bit_length() - 1):
                words, of = together(words, of, words, of)
            words = larger_words(words, builder.lshr(words, splatted(16, I32)))
            lanes = [int(np.flatnonzero(of == start + i)[0]) for i in range(count)]
            chosen = builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, count), lanes))
            store = builder.add(args[1], ir.Constant(args[1].type, 2 * start))
            short = ir.VectorType(I16, count)
            builder.store(builder.trunc(chosen, short), builder.inttoptr(store, short.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(address, to, wide), generate
