"""Sums under the scales of blocks that are powers of two, in CPU memory, with the help of the tensor's histogram.

Under such a scale a cast is nothing but a shorter significand, whatever the block, for all values but those so small beside
the amax of their block that they become subnormal. So the histogram tells the sums, and the tensor is read for the few
others. Where they are not few, to cast each value costs less.
"""

from __future__ import annotations

import functools

import numpy as np
from numba.np.numpy_support import carray

from .block_scales import tables_at
from .casts import rounded
from .jit import AHEAD, Work, counts_at, jit, prefetch, values_at, work
from .panels import MANY, amax_of_panel, next_panels, operand_of, panel_at, patch, results_of, rules_of, tell
from .simd import PANEL, below, lowest_bit, magnitude_of

#: values that are looked at before it is asked how many of them are such others
_AT_LEAST = 1 << 13
#: of how many values one may be
_FEW = 16


@functools.cache
def sums_of_small(wide: int, half: bool) -> Work:
    """The sums of those others, and how often which occur, unless they are not few; the job is `PanelJob`'s.

    Compiled for blocks of this width, a multiple of 32, of float16 or else of bfloat16.
    """
    per_panel = PANEL // wide

    @work
    def sums_of_panels(job: int) -> None:
        words, layout, high, infinity = operand_of(job)
        tables, _, small_counts = rules_of(job)
        scale_inv, scale, lost, floor, (limit, beyond, lowest, anchor) = tables_at(tables)
        amax, floors = np.zeros(max(32, per_panel), np.uint16), np.empty(per_panel, np.uint32)
        patched, tops = np.empty(high * PANEL if layout[1] % 32 else 1, np.uint16), np.empty(PANEL, np.uint16)
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counts = carray(counts_at(small_counts + share * 8 * 32768), 32768)
            underflows = overflows = seen = held = 0
            error2 = xq = q2 = 0.0
            top = np.int64(0)
            for p in range(first, end):
                panel = panel_at(layout, high, p)
                at, rows, columns = panel
                amax_of_panel(words, layout, panel, infinity, wide, amax, tops)
                for b in range((columns + wide - 1) // wide):
                    pattern = np.int64(amax[b] & 0x7FFF)
                    floors[b] = np.uint32(max(floor[pattern], 1) - 1) * np.uint32(0x10001)
                    top = max(top, pattern)
                row, stride = np.int64(words.ctypes.data) + 2 * at, 2 * layout[2]
                if columns % 32:
                    patch(words, at, layout[2], rows, columns, infinity, patched)
                    row, stride = np.int64(patched.ctypes.data), 2 * PANEL
                following = at + max(PANEL, 4 * AHEAD // high)
                for _ in range(rows):
                    for i in range(0, columns, 32):
                        prefetch(words, following + i)
                        small = below(row + 2 * i, floors[i // wide])
                        if small:
                            group, block = carray(values_at(row + 2 * i), 32), amax[i // wide] & 0x7FFF
                            by, inverse, gone = scale[block], scale_inv[block], lost[block]
                            while small:
                                pattern = np.int64(group[lowest_bit(small)] & 0x7FFF)
                                small &= small - 1
                                counts[pattern] += 1
                                value = magnitude_of(pattern, half)
                                scaled = value * by
                                x, q = np.float64(value), rounded(min(scaled, limit), lowest, anchor) * inverse
                                error2 += (x - q) * (x - q)
                                xq += x * q
                                q2 += q * q
                                underflows += pattern <= gone
                                overflows += scaled > beyond
                                held += 1
                    row += stride
                    following += layout[2]
                seen += rows * columns
                if seen > _AT_LEAST and held * _FEW > seen:
                    top = np.int64(MANY)
                    break
            tell(job, share, (underflows, overflows), (error2, xq, q2), top)
        patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_panels


@jit
def add_shortened(  # type: ignore[no-untyped-def]
    job, small, counts, n, infinity, magnitude, anchor
):
    """Add to the sums of the first share those of what a histogram counts, with significands cut short.

    Args:
        job: whose results were added up.
        small: see `PanelJob`; zeros again afterwards.
        counts: address of the histogram's, int64 [32768].
        n: how many values it has counted.
        magnitude: float32 [32768], the values.
        anchor: 1.5 * 2^(52 - digits of the significand), see `rounded`.
    """
    integers, sums = results_of(job, 0)
    table = carray(counts_at(counts), 32768)
    left, i = n - table[0] - table[infinity:].sum(), min(integers[2], infinity - 1)
    while left > 0 and i > 0:
        count = table[i]
        if count:
            left -= count
            for share in range(len(small)):
                count -= small[share, i]
                small[share, i] = 0
            x = np.float64(magnitude[i])
            binade = np.float64(x).view(np.int64) & 0x7FF0000000000000
            above = np.int64(binade).view(np.float64) * anchor
            q = (x + above) - above
            sums[0] += count * ((x - q) * (x - q))
            sums[1] += count * (x * q)
            sums[2] += count * (q * q)
        i -= 1
