"""The loops over the blocks of a 16-bit operand in CPU memory, value by value, and over its rows if each is a block.

A panel of blocks is read twice, for their amax and for the sums, the second time from a close cache. A row is read so
too, the second time from a cache unless it is longer than that.
"""

from __future__ import annotations

import functools

import numpy as np

from .block_scales import tables_at
from .casts import add, cast
from .jit import AHEAD, Work, prefetch, work
from .panels import amax_of_panel, largest_of_blocks, next_panels, operand_of, panel_at, patch, rules_of, tell
from .simd import PANEL, no_sums, total


@functools.cache
def sums_of_blocks(wide: int, half: bool) -> Work:
    """The sums of `QuantizationSums`; the job is `PanelJob`'s.

    Compiled for blocks of this width, a multiple of 16, of float16 or else of bfloat16.
    """
    # Numbers only: a compiled function among them has another name in each process, and would not be found on disk.
    per_panel, step = PANEL // wide, 16 if half or wide < 32 else 32

    @work
    def sums_of_panels(job: int) -> None:
        words, layout, high, infinity = operand_of(job)
        tables, clamps, _ = rules_of(job)
        scale_inv, scale, lost, _, spacing = tables_at(tables)
        room, scales, inverses = np.empty(2 * PANEL + 16, np.float32), np.zeros(per_panel, np.float32), np.zeros(per_panel)
        amax = np.zeros(max(32, per_panel), np.uint16)
        patched, tops, gone = np.empty(high * PANEL, np.uint16), np.empty(PANEL, np.uint16), np.zeros(per_panel, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q, spare = x + 4 * PANEL, np.int64(patched.ctypes.data)
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counted, summed = (0, 0), no_sums()
            for p in range(first, end):
                panel = panel_at(layout, high, p)
                at, rows, columns = panel
                amax_of_panel(words, layout, panel, infinity, wide, amax, tops)
                finite = largest_of_blocks(amax, per_panel) < infinity
                row, stride = np.int64(words.ctypes.data) + 2 * at, 2 * layout[2]
                if not finite or columns % max(step, wide):
                    patch(words, at, layout[2], rows, columns, infinity, patched)
                    row, stride = spare, 2 * PANEL
                following = at + max(PANEL, AHEAD // high)
                for b in range((columns + wide - 1) // wide):
                    pattern = amax[b] & 0x7FFF
                    scales[b], inverses[b], gone[b] = scale[pattern], scale_inv[pattern], lost[pattern]
                for _ in range(rows):
                    if clamps or not finite:
                        for i in range(0, columns, step):
                            prefetch(words, following + i)
                            by, most = scales[i // wide], gone[i // wide]
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, True)
                    else:
                        for i in range(0, columns, step):
                            prefetch(words, following + i)
                            by, most = scales[i // wide], gone[i // wide]
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, False)
                    for i in range(0, columns, step):
                        by_inverse = inverses[i // wide]
                        for j in range(i, i + step, 16):
                            summed = add(x + 4 * j, q + 4 * j, by_inverse, summed)
                    row += stride
                    following += layout[2]
            tell(job, share, counted, (total(summed[0]), total(summed[1]), total(summed[2])), 0)
        room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_panels


#: columns whose amax is found at once
_WIDE = 32


@functools.cache
def sums_of_rows(half: bool) -> Work:
    """The sums of `QuantizationSums`; the job is `PanelJob`'s, whose panels are rows. Of float16 or else of bfloat16."""
    step = 16 if half else 32

    @work
    def sums_of_whole_rows(job: int) -> None:
        words, layout, _, infinity = operand_of(job)
        tables, clamps, _ = rules_of(job)
        scale_inv, scale, lost, _, spacing = tables_at(tables)
        room, amax = np.empty(2 * PANEL + 16, np.float32), np.zeros(PANEL // _WIDE, np.uint16)
        patched, tops = np.empty(PANEL, np.uint16), np.empty(PANEL, np.uint16)
        x = (np.int64(room.ctypes.data) + 63) & -64  # to cache lines, or each vector would lie in two
        q, spare, columns = x + 4 * PANEL, np.int64(patched.ctypes.data), layout[1]
        while True:
            share, first, end = next_panels(job)
            if share < 0:
                break
            counted, summed = (0, 0), no_sums()
            for r in range(first, end):
                pattern, finite = np.int64(0), True
                for begin in range(0, columns, PANEL):
                    panel = r * layout[2] + begin, 1, min(PANEL, columns - begin)
                    amax_of_panel(words, layout, panel, infinity, _WIDE, amax, tops)
                    for b in range((panel[2] + _WIDE - 1) // _WIDE):
                        magnitude = np.int64(amax[b] & 0x7FFF)
                        pattern = magnitude if magnitude > pattern else pattern
                        finite = finite and amax[b] < infinity
                by, inverse, most = scale[pattern], scale_inv[pattern], lost[pattern]
                for begin in range(0, columns, PANEL):
                    at, there = r * layout[2] + begin, min(PANEL, columns - begin)
                    row = np.int64(words.ctypes.data) + 2 * at
                    if not finite or there % step:
                        patch(words, at, layout[2], 1, there, infinity, patched)
                        row = spare
                    for i in range(0, there, step):
                        if clamps or not finite:
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, True)
                        else:
                            counted = cast(row + 2 * i, by, most, spacing, x + 4 * i, q + 4 * i, counted, half, step, False)
                    for i in range(0, there, step):
                        for j in range(i, i + step, 16):
                            summed = add(x + 4 * j, q + 4 * j, inverse, summed)
            tell(job, share, counted, (total(summed[0]), total(summed[1]), total(summed[2])), 0)
        room[0] = patched[0] = tops[0] = 0  # they live until here, which their addresses do not say

    return sums_of_whole_rows
