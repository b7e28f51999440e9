"""The loops over the blocks of a 16-bit operand in CPU memory: 16 values at a time, in vectors of LLVM's.

A panel of blocks is read twice, for their amax and for the sums, the second time from a close cache. One file, since machine
code that is kept on disk is dated by the file of its loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from .cpu import jit, prefetch

Words = npt.NDArray[np.uint16]

#: rows, columns, values from one row to the next
Layout = tuple[int, int, int]

#: columns of a panel
PANEL = 1024
#: values read ahead, see `cpu.AHEAD`
AHEAD = 1024
#: the sign bit, which an amax has no use for: its block holds NaN
_NAN = 0x8000

_LANES = 16
_I16, _I32, _F32, _F64 = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.DoubleType()


class _Lanes(types.Type):
    """A vector of LLVM's as a type of Numba's, which has none."""

    def __init__(self, element: ir.Type, length: int = _LANES) -> None:
        self.vector = ir.VectorType(element, length)
        super().__init__(f"Lanes({self.vector})")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: _Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)  # type: ignore[no-untyped-call]


_FLOATS, _COUNTS, _SUMS = _Lanes(_F32), _Lanes(_I32), _Lanes(_F64)
_COUNTS_OF_2, _SUMS_OF_3 = types.UniTuple(_COUNTS, 2), types.UniTuple(_SUMS, 3)


def _all(value: Any, element: ir.Type, length: int = _LANES) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, length), [value] * length)


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, _LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), _all(0, _I32))


def _load(builder: Any, address: Any, vector: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def _call(builder: Any, name: str, result: ir.Type, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=fastmath)


@intrinsic
def _no_counts(typing_context: Any) -> Any:
    return _COUNTS_OF_2(), lambda context, *_: ir.Constant(context.get_value_type(_COUNTS_OF_2), None)


@intrinsic
def _no_sums(typing_context: Any) -> Any:
    return _SUMS_OF_3(), lambda context, *_: ir.Constant(context.get_value_type(_SUMS_OF_3), None)


@intrinsic
def _count(typing_context: Any, lanes: Any) -> Any:
    """All lanes added up."""
    return types.int32(lanes), lambda _, builder, __, args: _call(builder, "llvm.vector.reduce.add.v16i32", _I32, *args)


@intrinsic
def _sum(typing_context: Any, lanes: Any) -> Any:
    """All lanes added up, in any order."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _call(builder, "llvm.vector.reduce.fadd.v16f64", _F64, _F64(0.0), *args, fastmath=("reassoc",))

    return types.float64(lanes), generate


@intrinsic(prefer_literal=True)
def _magnitudes(typing_context: Any, address: Any, length: Any) -> Any:
    """The patterns of so many values, without their signs."""
    lanes = _Lanes(_I16, length.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(_load(builder, args[0], lanes.vector), _all(0x7FFF, _I16, length.literal_value))

    return lanes(address, length), generate


@intrinsic
def _larger(typing_context: Any, a: Any, b: Any) -> Any:
    return a(a, b), lambda _, builder, __, args: builder.select(builder.icmp_unsigned(">", *args), *args)


@intrinsic
def _largest(typing_context: Any, lanes: Any) -> Any:
    name = f"llvm.vector.reduce.umax.v{lanes.vector.count}i16"
    return types.uint16(lanes), lambda _, builder, __, args: _call(builder, name, _I16, *args)


def _values(builder: Any, address: Any, step: int, half: bool) -> list[Any]:
    """The magnitudes of `step` values in vectors of 16, float32; in an order of their own."""
    if step == _LANES:
        magnitude = builder.and_(_load(builder, address, ir.VectorType(_I16, _LANES)), _all(0x7FFF, _I16))
        if half:
            return [builder.fpext(builder.bitcast(magnitude, ir.VectorType(ir.HalfType(), _LANES)), _FLOATS.vector)]
        return [builder.bitcast(builder.shl(builder.zext(magnitude, _COUNTS.vector), _all(16, _I32)), _FLOATS.vector)]
    # Two bfloat16 to a word of 32 bits: half of them lie where those of a float32 do.
    pairs = _load(builder, address, _COUNTS.vector)
    return [
        builder.bitcast(builder.and_(upper, _all(0x7FFF0000, _I32)), _FLOATS.vector)
        for upper in (pairs, builder.shl(pairs, _all(16, _I32)))
    ]


@intrinsic(prefer_literal=True)
def _cast(
    typing_context: Any, words: Any, scale: Any, spacing: Any, x: Any, q: Any, counts: Any, step: Any, half: Any, clamps: Any
) -> Any:
    """Cast `step` finite values at the address `words`, to `x` (their magnitudes) and `q` (their codes); counts go on.

    Where `clamps` is False, nothing scaled is larger than the format's limit by more than rounding.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        limit, beyond, lowest, anchor = (_splat(builder, v) for v in cgutils.unpack_tuple(builder, args[2], 4))
        underflows, overflows = cgutils.unpack_tuple(builder, args[5], 2)
        floats, zero = _FLOATS.vector, _all(0.0, _F32)
        for i, value in enumerate(_values(builder, args[0], step.literal_value, half.literal_value)):
            scaled = clamped = builder.fmul(value, _splat(builder, args[1]))
            if clamps.literal_value:
                clamped = builder.select(builder.fcmp_ordered("<", scaled, limit), scaled, limit)
            # Added to 1.5 * 2^23 spacings of the format, float32's own rounding gives a multiple of the spacing.
            exponent = builder.and_(builder.bitcast(clamped, _COUNTS.vector), _all(0x7F800000, _I32))
            binade = builder.bitcast(exponent, floats)
            binade = builder.select(builder.fcmp_ordered(">", binade, lowest), binade, lowest)
            above = _call(builder, "llvm.fma.v16f32", floats, binade, anchor, clamped)
            code = _call(builder, "llvm.fma.v16f32", floats, binade, builder.fneg(anchor), above)
            lost = builder.and_(builder.fcmp_ordered("==", code, zero), builder.fcmp_unordered("!=", value, zero))
            underflows = builder.add(underflows, builder.zext(lost, _COUNTS.vector))
            if clamps.literal_value:
                overflow = builder.fcmp_ordered(">", scaled, beyond)
                overflows = builder.add(overflows, builder.zext(overflow, _COUNTS.vector))
            for kept, start in ((value, args[3]), (code, args[4])):
                address = builder.add(start, ir.Constant(start.type, 4 * _LANES * i))
                builder.store(kept, builder.inttoptr(address, floats.as_pointer()), align=4)
        return context.make_tuple(builder, signature.return_type, [underflows, overflows])

    return _COUNTS_OF_2(words, scale, spacing, x, q, counts, step, half, clamps), generate


@intrinsic
def _add(typing_context: Any, x: Any, q: Any, scale_inv: Any, sums: Any) -> Any:
    """Add 16 values at the addresses `x` and `q` to the sums of squared errors, of products and of squares."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def doubles(address: Any) -> Any:
            return builder.fpext(_load(builder, address, _FLOATS.vector), _SUMS.vector)

        def plus(a: Any, b: Any, total: Any) -> Any:
            return _call(builder, "llvm.fma.v16f64", _SUMS.vector, a, b, total)

        error2, xq, q2 = cgutils.unpack_tuple(builder, args[3], 3)
        value, back = doubles(args[0]), builder.fmul(doubles(args[1]), _splat(builder, args[2]))
        error = builder.fsub(value, back)
        added = [plus(error, error, error2), plus(value, back, xq), plus(back, back, q2)]
        return context.make_tuple(builder, signature.return_type, added)

    return _SUMS_OF_3(x, q, scale_inv, sums), generate


@jit
def _amax_but_nan(words: Words, at: int, stride: int, rows: int, columns: int, infinity: int) -> int:
    """The pattern of the largest magnitude; NaN counts for nothing."""
    amax = 0
    for r in range(rows):
        for c in range(columns):
            magnitude = words[at + r * stride + c] & 0x7FFF
            if amax < magnitude <= infinity:
                amax = magnitude
    return amax


@jit
def _panel(layout: Layout, high: int, p: int) -> tuple[int, int, int]:
    """Where panel `p` begins, how many rows it has and how many columns."""
    rows, columns, stride = layout
    across = (columns + PANEL - 1) // PANEL
    row, column = p // across * high, p % across * PANEL
    return row * stride + column, min(high, rows - row), min(PANEL, columns - column)


@jit
def _ask_for(words: Words, at: int, columns: int) -> None:
    for i in range(at, at + columns, 32):
        prefetch(words, i)  # type: ignore[call-arg]


@jit
def _patch(words: Words, at: int, stride: int, rows: int, columns: int, infinity: int, patched: Words) -> None:
    """Copy a panel, with zeros for what is not finite or not there."""
    patched[: rows * PANEL] = 0
    for r in range(rows):
        for c in range(columns):
            word = words[at + r * stride + c]
            patched[r * PANEL + c] = word if word & 0x7FFF < infinity else 0


@jit
def _amax_of_panel(  # type: ignore[no-untyped-def]
    words, base, stride, at, rows, columns, infinity, wide, amax, first
):
    for b in range((columns + wide - 1) // wide):
        start = at + b * wide
        if b * wide + wide <= columns:
            lanes = _magnitudes(base + 2 * start, 16)  # type: ignore[call-arg, var-annotated]
            for r in range(rows):
                for i in range(start + r * stride, start + r * stride + wide, 16):
                    lanes = _larger(lanes, _magnitudes(base + 2 * i, 16))
            amax[first + b] = _largest(lanes)
            if amax[first + b] > infinity:
                amax[first + b] = _NAN | _amax_but_nan(words, start, stride, rows, wide, infinity)
        else:
            amax[first + b] = _amax_but_nan(words, start, stride, rows, columns - b * wide, infinity)


class Kernels(NamedTuple):
    """Loops over a share of the panels, from `panels[0]` up to `panels[1]`. `infinity` is its pattern.

    `amax`: uint16, patterns, panel by panel, as many as a panel has blocks; with the sign bit where a block holds NaN.
    """

    #: (words, layout, high, panels, infinity, amax): finds `amax`; gives the smallest but 0 and the largest
    amax: Callable[..., tuple[int, int]]
    #: (words, layout, high, panels, infinity, amax, known, scale, scale_inv, clamps, spacing, counts, sums): adds to the
    #: last two; `amax` is that of all panels, or where it is not known room for one
    sums: Callable[..., None]


@functools.cache
def kernels(wide: int, half: bool) -> Kernels:
    """Compiled for blocks of this width, a multiple of 16, of float16 or else of bfloat16."""
    # Numbers only: a compiled function among them has another name in each process, and would not be found on disk.
    per_panel, step = PANEL // wide, 16 if half or wide < 32 else 32

    @jit
    def amax_of_panels(words, layout, high, panels, infinity, amax):  # type: ignore[no-untyped-def]
        base, smallest, largest = np.int64(words.ctypes.data), np.uint16(0xFFFF), np.uint16(0)
        for p in range(panels[0], panels[1]):
            at, rows, columns = _panel(layout, high, p)
            for r in range(rows):
                _ask_for(words, at + r * layout[2] + max(PANEL, AHEAD // high), columns)
            _amax_of_panel(words, base, layout[2], at, rows, columns, infinity, wide, amax, per_panel * p)
            for b in range(per_panel * p, per_panel * p + (columns + wide - 1) // wide):
                pattern = np.uint16(amax[b] & 0x7FFF)
                largest = max(largest, pattern)
                smallest = min(smallest, np.uint16(pattern - 1))  # 0 becomes the largest of all
        return np.int64(smallest) + 1, np.int64(largest)

    @jit
    def sums_of_panels(  # type: ignore[no-untyped-def]
        words, layout, high, panels, infinity, amax, known, scale, scale_inv, clamps, spacing, counts, sums
    ):
        room, patched = np.empty(2 * PANEL + 16, np.float32), np.empty(high * PANEL, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q = x + 4 * PANEL
        scales, inverses = np.empty(per_panel, np.float32), np.empty(per_panel, np.float64)
        base, spare = np.int64(words.ctypes.data), np.int64(patched.ctypes.data)
        total = _no_sums()  # type: ignore[call-arg, var-annotated]
        for p in range(panels[0], panels[1]):
            at, rows, columns = _panel(layout, high, p)
            first = per_panel * p if known else 0
            if not known:
                _amax_of_panel(words, base, layout[2], at, rows, columns, infinity, wide, amax, first)
            blocks, finite = (columns + wide - 1) // wide, True
            for b in range(blocks):
                pattern = amax[first + b]
                finite &= pattern < infinity
                scales[b], inverses[b] = scale[pattern & 0x7FFF], scale_inv[pattern & 0x7FFF]
            row, stride = base + 2 * at, 2 * layout[2]
            if not finite or columns % wide:
                _patch(words, at, layout[2], rows, columns, infinity, patched)
                row, stride = spare, 2 * PANEL
            counted = _no_counts()
            for r in range(rows):
                _ask_for(words, at + r * layout[2] + max(PANEL, AHEAD // high), columns)
                if clamps or not finite:
                    for b in range(blocks):
                        for i in range(b * wide, b * wide + wide, step):
                            counted = _cast(row + 2 * i, scales[b], spacing, x + 4 * i, q + 4 * i, counted, step, half, True)
                else:
                    for b in range(blocks):
                        for i in range(b * wide, b * wide + wide, step):
                            counted = _cast(
                                row + 2 * i, scales[b], spacing, x + 4 * i, q + 4 * i, counted, step, half, False
                            )
                for b in range(blocks):
                    for i in range(b * wide, b * wide + wide, 16):
                        total = _add(x + 4 * i, q + 4 * i, inverses[b], total)
                row += stride
            counts[0] += _count(counted[0])
            counts[1] += _count(counted[1])
        sums[0] += _sum(total[0])
        sums[1] += _sum(total[1])
        sums[2] += _sum(total[2])
        room[0] = patched[0] = 0  # they live until here, which their addresses do not say

    return Kernels(amax_of_panels, sums_of_panels)
