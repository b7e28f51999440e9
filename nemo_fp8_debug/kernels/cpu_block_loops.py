"""The loops over the blocks of a 16-bit operand in CPU memory.

A panel of blocks is read twice, for their amax and for the sums, the second time from a close cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from .cpu import jit, prefetch, values_at
from .cpu_casts import SEGMENT, add, add_products, cast, fold, keep_below
from .cpu_lanes import (
    PANEL,
    amaxes,
    count,
    larger,
    largest,
    magnitudes,
    negative,
    no_counts,
    no_products,
    no_sums,
    no_words,
    patterns,
    store,
    total,
)

Words = npt.NDArray[np.uint16]

#: rows, columns, values from one row to the next
Layout = tuple[int, int, int]

#: values read ahead, see `cpu.AHEAD`
AHEAD = 1024
#: the sign bit, which an amax has no use for: its block holds NaN
_NAN = 0x8000
#: panels whose counts 32 bits hold
_MANY = 1 << 16
#: binades from the segment's largest value on that `fold` takes beside its own
_BINADES = 10


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
def _patch(words: Words, at: int, stride: int, rows: int, columns: int, infinity: int, patched: Words) -> None:
    """Copy a panel, with zeros for what is not finite or not there."""
    patched[: rows * PANEL] = 0
    for r in range(rows):
        for c in range(columns):
            word = words[at + r * stride + c]
            patched[r * PANEL + c] = word if word & 0x7FFF < infinity else 0


@jit
def _largest_of_columns(words: Words, at: int, stride: int, rows: int, columns: int, tops: Words) -> None:
    """The patterns of the largest magnitudes of the columns of a panel, NaN the largest, and zeros up to its width."""
    base, to, whole = np.int64(words.ctypes.data) + 2 * at, np.int64(tops.ctypes.data), columns // 32 * 32
    for c in range(0, whole, 32):
        top = magnitudes(base + 2 * c)
        for r in range(1, rows):
            top = larger(top, magnitudes(base + 2 * (r * stride + c)))
        store(top, to + 2 * c)
    tops[whole:] = 0
    for r in range(rows):
        for c in range(whole, columns):
            tops[c] = max(tops[c], words[at + r * stride + c] & 0x7FFF)


@jit
def _largest_of_blocks(  # type: ignore[no-untyped-def]
    amax, first, blocks
):
    """The largest of so many patterns, or of 32, of NaN the sign as well."""
    base = np.int64(amax.ctypes.data)
    top = patterns(base + 2 * first)
    for b in range(first + 32, first + blocks, 32):
        top = larger(top, patterns(base + 2 * b))
    return np.int64(largest(top))


@jit
def _amax_of_panel(  # type: ignore[no-untyped-def]
    words, layout, panel, infinity, wide, amax, first, tops
):
    at, rows, columns = panel
    start = np.int64(words.ctypes.data) + 2 * at
    if rows > 1 or columns < PANEL:
        _largest_of_columns(words, at, layout[2], rows, columns, tops)
        start = np.int64(tops.ctypes.data)
    amaxes(start, np.int64(amax.ctypes.data) + 2 * first, wide)
    if _largest_of_blocks(amax, first, PANEL // wide) > infinity:
        for b in range((columns + wide - 1) // wide):
            if amax[first + b] > infinity:
                there = min(wide, columns - b * wide)
                amax[first + b] = _NAN | _amax_but_nan(words, at + b * wide, layout[2], rows, there, infinity)


@jit
def bounds(  # type: ignore[no-untyped-def]
    amax,
):
    """The smallest pattern but 0 and the largest; their number is a multiple of 32."""
    base, most, least = np.int64(amax.ctypes.data), no_words(), no_words()
    for i in range(0, amax.size, 32):
        found = magnitudes(base + 2 * i)
        most = larger(most, found)
        least = larger(least, negative(found))
    amax[0] = amax[0]  # it lives until here, which its address does not say
    return -np.int64(largest(least)) & 0xFFFF, np.int64(largest(most))


@jit
def _floors(  # type: ignore[no-untyped-def]
    amax, first, normal, segments, per_segment, floors
):
    """The pattern from which on `fold` takes the values of each segment."""
    for g in range(segments):
        top = np.int64(0)
        for b in range(first + g * per_segment, first + (g + 1) * per_segment):
            top = max(top, np.int64(amax[b]))
        floors[g] = max(np.int64(normal[top]), (top & 0x7F80) - (_BINADES << 7))


class Kernels(NamedTuple):
    """Loops over a share of the panels, from `panels[0]` up to `panels[1]`. `infinity` is its pattern.

    `amax`: uint16, patterns, panel by panel, as many as a panel has blocks; with the sign bit where a block holds NaN. There
    are 32 at the least.
    """

    #: (address, layout, high, panels, infinity, amax): finds `amax`
    amax: Callable[..., None]
    #: (address, layout, high, panels, infinity, amax, known, scale, scale_inv, normal, clamps, spacing, drop): the sums of
    #: `QuantizationSums`; `amax` is that of all panels, or where it is not known room for one; `drop` as in `fold`
    sums: Callable[..., tuple[int, int, float, float, float]]


@functools.cache
def kernels(wide: int, half: bool) -> Kernels:
    """Compiled for blocks of this width, a multiple of 16, of float16 or else of bfloat16."""
    # Numbers only: a compiled function among them has another name in each process, and would not be found on disk.
    per_panel, step = PANEL // wide, 16 if half or wide < 32 else 32

    @jit
    def amax_of_panels(address, layout, high, panels, infinity, amax):  # type: ignore[no-untyped-def]
        words = carray(values_at(address), ((layout[0] - 1) * layout[2] + layout[1],))
        tops = np.empty(PANEL, np.uint16)
        for p in range(panels[0], panels[1]):
            panel = _panel(layout, high, p)
            for r in range(panel[1]):
                following = panel[0] + r * layout[2] + max(PANEL, AHEAD // high)
                for i in range(following, following + panel[2], 32):
                    prefetch(words, i)  # type: ignore[call-arg]
            _amax_of_panel(words, layout, panel, infinity, wide, amax, per_panel * p, tops)

    @jit
    def sums_of_panels(  # type: ignore[no-untyped-def]
        address, layout, high, panels, infinity, amax, known, scale, scale_inv, normal, clamps, spacing, drop
    ):
        words = carray(values_at(address), ((layout[0] - 1) * layout[2] + layout[1],))
        room, scales, inverses = np.empty(2 * PANEL + 16, np.float32), np.empty(per_panel, np.float32), np.empty(per_panel)
        patched, tops = np.empty(high * PANEL, np.uint16), np.empty(PANEL, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q, spare, low = x + 4 * PANEL, np.int64(patched.ctypes.data), np.int64(tops.ctypes.data)
        floors, folds = np.empty(PANEL // SEGMENT, np.int64), step == 32 and normal.size > 0 and not clamps
        underflows, overflows, few = 0, 0, True
        counted, summed, folded = no_counts(), no_sums(), no_sums()
        for p in range(panels[0], panels[1]):
            panel = _panel(layout, high, p)
            at, rows, columns = panel
            first = per_panel * p if known else 0
            if not known:
                _amax_of_panel(words, layout, panel, infinity, wide, amax, first, tops)
            blocks, finite = (columns + wide - 1) // wide, _largest_of_blocks(amax, first, per_panel) < infinity
            row, stride = np.int64(address) + 2 * at, 2 * layout[2]
            if not finite or columns % wide:
                _patch(words, at, layout[2], rows, columns, infinity, patched)
                row, stride = spare, 2 * PANEL
            if p % _MANY == 0:
                underflows += count(counted[0])
                overflows += count(counted[1])
                counted = no_counts()
            following = at + max(PANEL, AHEAD // high)
            if folds and finite and columns % SEGMENT == 0 and (few or p % 16 == 0):
                _floors(amax, first, normal, columns // SEGMENT, SEGMENT // wide, floors)
                left = 0
                for _ in range(rows):
                    for g in range(columns // SEGMENT):
                        products = no_products()
                        for i in range(g * SEGMENT, (g + 1) * SEGMENT, 32):
                            prefetch(words, following + i)  # type: ignore[call-arg]
                            products, some = fold(row + 2 * i, floors[g], products, drop)
                            if some:
                                left += 1
                                pattern = amax[first + i // wide]
                                keep_below(row + 2 * i, floors[g], low)
                                counted = cast(low, scale[pattern], spacing, x, q, counted, step, half, False)
                                for j in range(0, 128, 64):
                                    summed = add(x + j, q + j, scale_inv[pattern], summed)
                        folded = add_products(products, floors[g], folded)
                    row += stride
                    following += layout[2]
                few = 2 * 32 * left < rows * columns
            else:
                for b in range(blocks):
                    pattern = amax[first + b] & 0x7FFF
                    scales[b], inverses[b] = scale[pattern], scale_inv[pattern]
                for _ in range(rows):
                    if clamps or not finite:
                        for b in range(blocks):
                            for i in range(b * wide, b * wide + wide, step):
                                prefetch(words, following + i)  # type: ignore[call-arg]
                                counted = cast(
                                    row + 2 * i, scales[b], spacing, x + 4 * i, q + 4 * i, counted, step, half, True
                                )
                    else:
                        for b in range(blocks):
                            for i in range(b * wide, b * wide + wide, step):
                                prefetch(words, following + i)  # type: ignore[call-arg]
                                counted = cast(
                                    row + 2 * i, scales[b], spacing, x + 4 * i, q + 4 * i, counted, step, half, False
                                )
                    for b in range(blocks):
                        for i in range(b * wide, b * wide + wide, 16):
                            summed = add(x + 4 * i, q + 4 * i, inverses[b], summed)
                    row += stride
                    following += layout[2]
        underflows += count(counted[0])
        overflows += count(counted[1])
        q2 = total(folded[2]) * 4.0**drop
        xq = total(folded[1]) * 2.0**drop + q2
        room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say
        return underflows, overflows, total(summed[0]) + total(folded[0]), total(summed[1]) + xq, total(summed[2]) + q2

    return Kernels(amax_of_panels, sums_of_panels)
