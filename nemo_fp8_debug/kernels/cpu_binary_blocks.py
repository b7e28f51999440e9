"""Sums under the scales of blocks that are powers of two, in CPU memory, with the help of the tensor's sketch.

Under such a scale a cast is nothing but a shorter significand, whatever the block, for all values but those so small beside
the amax of their block that they become subnormal. So the sketch tells the sums, and the tensor is read for the few others.
Where they are not few, to cast each value costs less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba.np.numpy_support import carray

from ..numerics.sketch import BINS
from .cpu import AHEAD, jit, occupied, prefetch, values_at
from .cpu_casts import add, cast
from .cpu_lanes import PANEL, below, keep, lowest_bit, no_sums, total
from .cpu_panels import amax_of_panel, panel_at, patch

#: groups of 32 values that are looked at before it is asked how many of them hold such others
_AT_LEAST = 256
#: of how many groups one may
_FEW = 4


@functools.cache
def sums_of_small(wide: int, half: bool) -> Callable[..., tuple[bool, int, int, float, float, float]]:
    """The sums of those others, over a share of the panels, and how often which occur; but first whether they are few.

    Compiled for blocks of this width, a multiple of 32. (address, layout, high, panels, infinity, floor, scale, scale_inv,
    lost, spacing, counts): as in `sums_of_blocks`; `counts`, int64 [32768], are added to.
    """
    per_panel, step = PANEL // wide, 16 if half else 32

    @jit
    def sums_of_panels(  # type: ignore[no-untyped-def]
        address, layout, high, panels, infinity, floor, scale, scale_inv, lost, spacing, counts
    ):
        words = carray(values_at(address), ((layout[0] - 1) * layout[2] + layout[1],))
        amax, floors = np.zeros(max(32, per_panel), np.uint16), np.empty(per_panel, np.uint32)
        patched, tops = np.empty(high * PANEL, np.uint16), np.empty(PANEL, np.uint16)
        kept, room = np.empty(32, np.uint16), np.empty(64, np.float32)
        low, x, q = np.int64(kept.ctypes.data), np.int64(room.ctypes.data), np.int64(room.ctypes.data) + 128
        counted, summed, groups, held = (0, 0), no_sums(), 0, 0
        for p in range(panels[0], panels[1]):
            panel = panel_at(layout, high, p)
            at, rows, columns = panel
            amax_of_panel(words, layout, panel, infinity, wide, amax, tops)
            for b in range((columns + wide - 1) // wide):
                floors[b] = np.uint32(floor[amax[b] & 0x7FFF]) * np.uint32(0x10001)
            row, stride = np.int64(address) + 2 * at, 2 * layout[2]
            if columns % 32:
                patch(words, at, layout[2], rows, columns, infinity, patched)
                row, stride = np.int64(patched.ctypes.data), 2 * PANEL
            following = at + max(PANEL, AHEAD // high)
            for _ in range(rows):
                for i in range(0, columns, 32):
                    prefetch(words, following + i)  # type: ignore[call-arg]
                    small = below(row + 2 * i, floors[i // wide])
                    if small:
                        small = keep(row + 2 * i, small, low)
                        if small:
                            held += 1
                            pattern = amax[i // wide] & 0x7FFF
                            by, inverse = (scale[pattern], scale[pattern]), (scale_inv[pattern], scale_inv[pattern])
                            most = lost[pattern], lost[pattern]
                            for j in range(0, 32, step):
                                counted = cast(low + 2 * j, by, most, spacing, x, q, counted, half, False, True)
                                for k in range(0, 4 * step, 64):
                                    summed = add(x + k, q + k, inverse, summed, False)
                            while small:
                                counts[kept[lowest_bit(small)]] += 1
                                small &= small - 1
                row += stride
                following += layout[2]
            groups += rows * ((columns + 31) // 32)
            if groups > _AT_LEAST and held * _FEW > groups:
                break
        kept[0] = room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say
        are_few = groups <= _AT_LEAST or held * _FEW <= groups
        return are_few, counted[0], counted[1], total(summed[0]), total(summed[1]), total(summed[2])

    return sums_of_panels


@jit
def sums_of_shortened(  # type: ignore[no-untyped-def]
    address, but, infinity, magnitude, anchor
):
    """Sums of squared errors, of products and of squares of what a sketch counts, with significands cut short.

    Args:
        address: of its counts, int64 [32768].
        but: int64 [32768], how often values are not meant.
        magnitude: float32 [32768], the values.
        anchor: 1.5 * 2^(52 - digits of the significand), see `rounded`.
    """
    bins, counts = np.empty(BINS, np.int64), np.empty(BINS, np.int64)
    error2 = xq = q2 = 0.0
    for i in range(occupied(address, bins, counts)):
        if 0 < bins[i] < infinity:
            x, n = np.float64(magnitude[bins[i]]), np.float64(counts[i] - but[bins[i]])
            binade = np.float64(x).view(np.int64) & 0x7FF0000000000000
            above = np.int64(binade).view(np.float64) * anchor
            q = (x + above) - above
            error2 += n * ((x - q) * (x - q))
            xq += n * (x * q)
            q2 += n * (q * q)
    return error2, xq, q2
